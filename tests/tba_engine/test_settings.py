"""Settings of the I/O layer, seen from training: they bound, verify, slow down and stripe, and never change a bit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.engine import activation, chain, chain_gradient, stored_chain
from support.exactness import assert_bit_equal
from tba import ConfigError, OffloadConfig, Offloader, OffloadStats, OffloadWarning

MIB = 1 << 20
LENGTH = 6  # tensors of a chain


def train(scratch: Path, elements: int = MIB // 4, **settings: object) -> OffloadStats:
    """One step through the file, bit-equal to plain; returns what moved."""
    settings = {"tier": "nvme", "min_tensor_bytes": 0, "prefetch_bytes": 0, "storage_paths": scratch, **settings}
    offload = Offloader(config=OffloadConfig(**settings))
    leaf, y = stored_chain(offload, elements, length=LENGTH)
    y.sum().backward()
    assert_bit_equal(leaf.grad, chain_gradient(leaf, LENGTH))
    stats = offload.stats()
    offload.close()
    return stats


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_several_paths_are_used_as_one(scratch: Path) -> None:
    paths = [scratch / name for name in ("a", "b", "c")]
    for path in paths:
        path.mkdir()
    stats = train(scratch, storage_paths=paths)
    assert stats.read_bytes >= stats.offloaded_bytes >= LENGTH * MIB
    assert [list(path.iterdir()) for path in paths] == [[], [], []]


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_disk_budget_of_a_node_bounds_the_files(ranks: int, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    with pytest.warns(OffloadWarning, match="do not fit into a scratch file .* stays in memory"):
        stats = train(scratch, nvme_budget=5 * MIB // 2 * ranks)
    assert 0 < stats.written_bytes <= 5 * MIB // 2
    assert stats.kept_by_reason["write failed"] == stats.kept_bytes >= (LENGTH - 3) * MIB


def test_past_the_allowance_of_the_day_tensors_stay_and_the_next_run_knows(scratch: Path, state: Path) -> None:
    with pytest.warns(OffloadWarning, match=r"bytes that may be written on .* have been"):
        stats = train(scratch, max_write_bytes_per_day=2 * MIB + MIB // 2)
    assert stats.written_today_bytes == 2 * MIB
    assert stats.kept_by_reason == {"write allowance of the day used up": stats.kept_bytes}
    assert stats.offloaded_bytes == 2 * MIB
    nothing = pytest.warns(OffloadWarning, match="moved nothing.*write allowance of the day used up")
    with nothing, pytest.warns(OffloadWarning, match=r"bytes that may be written on"):
        again = train(scratch, max_write_bytes_per_day=2 * MIB + MIB // 2)
    assert again.offloaded_bytes == again.written_bytes == 0
    assert again.written_today_bytes == 2 * MIB


def test_kvikio_says_what_it_cannot_do(scratch: Path) -> None:
    for name, value in (("checksum", True), ("max_write_rate", "1GiB/s"), ("max_read_rate", "1GiB/s")):
        with pytest.raises(ConfigError, match=f"{name} was asked for with io_backend 'kvikio'"):
            Offloader(config=OffloadConfig(tier="nvme", storage_paths=scratch, io_backend="kvikio", **{name: value}))


def test_stats_project_what_a_day_writes(scratch: Path) -> None:
    offload = Offloader(config=OffloadConfig(tier="nvme", min_tensor_bytes=0, storage_paths=scratch))
    assert offload.stats().projected_bytes_per_day == 0
    _, x = activation(MIB)
    time.sleep(1)  # a rate over less says nothing
    with offload:
        y = chain(x, 2)
    offload.flush()
    stats = offload.stats()
    del y
    offload.close()
    assert stats.projected_bytes_per_day > 1000 * stats.written_bytes >= 8000 * MIB
