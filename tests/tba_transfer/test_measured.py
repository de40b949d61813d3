"""Measured: `io_backend="auto"` takes kvikio only where `tba doctor` found it faster than pinned memory."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from io_backends import KvikioStore, PosixStore, Store
from support.kvikio_double.fake import Kvikio
from tba import OffloadConfig
from tba._transfer import measured
from tba._transfer.build import open_store
from tba._transfer.measured import Setup, Speed, choose, measured_file, read, record, setup_of
from tba._transfer.scratch_paths import Directory

HERE = Setup("node: ext4 on /dev/nvme0n1 at /data", "A GPU", "26.10", "nvidia 580 nvidia_fs 2.2")
SLOW, FAST = Speed(1e9, 1e9), Speed(2e9, 3e9)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of measurements, in a cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return measured_file()


FOUND: dict[str, tuple[Setup, Speed, Speed, Setup | None, str, str]] = {
    "faster": (HERE, SLOW, FAST, HERE, "kvikio", "kvikio 2.00 GB/s to write and 3.00 GB/s to read, pinned memory 1.00"),
    "slower": (HERE, FAST, SLOW, HERE, "posix", "measured: kvikio 1.00 GB/s"),
    "faster one way only": (HERE, Speed(4e9, 4e9), Speed(9e9, 2e9), HERE, "posix", "measured"),
    "other device": (HERE, SLOW, FAST, HERE._replace(device="B GPU"), "posix", "has not measured kvikio there"),
    "other mount": (HERE, SLOW, FAST, HERE._replace(place="node: xfs"), "posix", "has not measured kvikio there"),
    "other kvikio": (HERE, SLOW, FAST, HERE._replace(kvikio="27.0"), "posix", "with other versions .*; run it again"),
    "other driver": (HERE, SLOW, FAST, HERE._replace(driver="nvidia 590"), "posix", "with other versions"),
    "no device": (HERE, SLOW, FAST, None, "posix", "no CUDA device"),
    "no speed": (HERE, Speed(0, 0), FAST, HERE, "posix", "has not measured"),
}


@pytest.mark.parametrize("name", FOUND)
def test_kvikio_is_taken_only_where_it_was_faster_with_this_kvikio_and_driver(name: str, file: Path) -> None:
    then, pinned, kvikio, now, backend, why = FOUND[name]
    assert record(file, then, pinned, kvikio) is None
    choice = choose(read(file), now)
    assert choice.backend == backend
    assert re.search(why, choice.why)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2, "measured": {}}', '{"version": 1, "measured": 3}', "\xff"]
)
def test_a_file_that_cannot_be_read_says_nothing_and_is_made_anew(text: str, file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text, "latin-1")
    assert read(file) == {}
    assert record(file, HERE, SLOW, FAST) is None
    assert record(file, HERE._replace(device="B GPU"), FAST, SLOW) is None
    assert [choose(read(file), each).backend for each in (HERE, HERE._replace(device="B GPU"))] == ["kvikio", "posix"]
    assert os.listdir(file.parent) == [file.name]
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("entry", [{}, {"versions": [], "pinned": [1], "kvikio": [1, 2]}, {"pinned": "fast"}, None, 3])
def test_an_entry_of_another_form_counts_as_none(entry: object) -> None:
    assert choose({f"{HERE.place}, {HERE.device}": entry}, HERE).backend == "posix"


def test_a_file_that_cannot_be_written_is_told(file: Path) -> None:
    file.parent.parent.mkdir()
    file.parent.write_text("no directory")
    assert "cannot be made" in str(record(file, HERE, SLOW, FAST))


OPENED: dict[str, tuple[dict[str, Any], bool, bool, type[Store]]] = {
    "on a device": ({}, True, True, KvikioStore),
    "not measured": ({}, True, False, PosixStore),
    "on a CPU": ({}, False, True, PosixStore),
    "with a checksum": ({"checksum": True}, True, True, PosixStore),
    "with a rate": ({"max_read_rate": "1GB/s"}, True, True, PosixStore),
    "posix": ({"io_backend": "posix"}, True, True, PosixStore),
    "kvikio": ({"io_backend": "kvikio"}, True, False, KvikioStore),
}


@pytest.mark.parametrize("name", OPENED)
def test_a_store_is_opened_by_what_was_measured(
    name: str, file: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings, on_device, is_measured, kind = OPENED[name]
    Kvikio().install(monkeypatch)
    sys.modules["kvikio"].__version__ = "26.10"  # type: ignore[attr-defined]
    device = SimpleNamespace(
        current_device=lambda: 0, get_device_properties=lambda index: SimpleNamespace(name="A GPU")
    )
    monkeypatch.setattr(measured, "active", lambda: ("cuda", device))
    setup = setup_of(scratch)
    assert setup is not None
    assert setup[1:3] == ("A GPU", "26.10")
    if is_measured:
        record(file, setup, SLOW, FAST)
    caplog.set_level("INFO", "tba")
    store = open_store(OffloadConfig(tier="nvme", **settings), [Directory(scratch, None)], on_device)
    assert type(store) is kind
    store.close()
    assert (f"io_backend 'auto' takes kvikio for {scratch}: measured" in caplog.text) == (name == "on a device")


def test_what_is_recorded_is_readable(file: Path) -> None:
    record(file, HERE, SLOW, FAST)
    assert json.loads(file.read_text()) == {
        "version": 1,
        "measured": {
            f"{HERE.place}, A GPU": {"versions": ["26.10", HERE.driver], "pinned": [1e9, 1e9], "kvikio": [2e9, 3e9]}
        },
    }
