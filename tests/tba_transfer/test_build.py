"""Build: the store, and its limits, that settings ask for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from io_backends import HostStore, PosixStore, StripedStore, TwoLevelStore
from tba import ConfigError, OffloadConfig
from tba._transfer.build import cpu_budget_bytes, directories, open_store
from tba._transfer.scratch_paths import Directory

GIB = 1 << 30


def opened(paths: list[Path], *, on_device: bool = False, **settings: Any) -> Any:
    found = [Directory(path, path.stat().st_dev) for path in paths]
    store = open_store(OffloadConfig(**settings), found, on_device)
    store.close()
    return store


def test_one_path_is_one_file(scratch: Path) -> None:
    store = opened([scratch], tier="nvme", io_threads=3, checksum=True, max_write_rate="1MB/s", io_timeout=5)
    assert type(store) is PosixStore
    assert store.directory == scratch
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(("cores", "settings", "threads"), [(2, {}, 1), (64, {}, 2), (2, {"io_threads": 3}, 3)])
def test_workers_for_this_machine(
    cores: int, settings: dict[str, int], threads: int, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    store = opened([scratch], tier="nvme", **settings)
    assert len(store._workers._slots) == threads


def test_several_paths_are_striped(scratch: Path) -> None:
    assert type(opened([scratch, scratch], tier="nvme")) is StripedStore


@pytest.mark.parametrize(("tier", "on_device", "kind"), [("auto", False, PosixStore), ("auto", True, TwoLevelStore)])
def test_auto_keeps_what_comes_from_a_device_in_host_memory_first(
    tier: str, on_device: bool, kind: type, scratch: Path
) -> None:
    assert type(opened([scratch], tier=tier, on_device=on_device)) is kind


def test_the_upper_level_leaves_room_for_copies(scratch: Path) -> None:
    store = opened([scratch], tier="auto", on_device=True, cpu_budget=4 * GIB)
    assert store.budget_bytes == 3 * GIB


def test_tier_cpu_stays_in_memory_within_the_budget() -> None:
    store = opened([], tier="cpu", cpu_budget=GIB)
    assert type(store) is HostStore
    assert store.budget_bytes == GIB


def test_the_budget_of_memory_is_shared_by_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert cpu_budget_bytes(OffloadConfig(cpu_budget=GIB)) == GIB // 8


def test_settings_that_go_together_pass() -> None:
    assert directories(OffloadConfig(tier="keep", io_backend="kvikio")) == ()
    assert directories(OffloadConfig(tier="keep", checksum=True)) == ()
    with pytest.raises(ConfigError, match="checksum was asked for with io_backend 'kvikio'"):
        directories(OffloadConfig(io_backend="kvikio", checksum=True))
