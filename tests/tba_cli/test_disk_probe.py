"""The disk probe: what it moves, that it compares, and that no disk, however bad, hangs it or is praised."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from io_backends import Buffer, PosixStore, Store, Ticket
from io_backends.testing import Fault, FaultyStore, Operation
from support.stores import Plan
from tba.cli._doctor import disk_probe
from tba.cli._doctor.disk_probe import DiskFacts, probe_bytes, probe_disk

MIB = 1 << 20


class Recorder:
    """A store that remembers what was asked of it, and may answer a read with the block of another."""

    def __init__(self, store: Store, *, stale: bool = False) -> None:
        self._store, self._stale = store, stale
        self.written: list[Ticket] = []
        self._first: Any = None
        self.read_bytes = 0
        self.live = 0
        self.peak_file_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, buffer: Buffer) -> Ticket:
        self.live += 1
        self.written.append(self._store.write(buffer))
        return self.written[-1]

    def read(self, location: Any, buffer: Buffer) -> Ticket:
        self.read_bytes += buffer.nbytes
        self.peak_file_bytes = max(self.peak_file_bytes, self._store.allocated_bytes())
        self._first = location if self._first is None else self._first
        return self._store.read(self._first if self._stale else location, buffer)

    def discard(self, ticket: Ticket) -> None:
        self.live -= 1
        self._store.discard(ticket)


def probe(directory: Path, **settings: Any) -> DiskFacts:
    return probe_disk(directory, **{"threads": 2, "most_bytes": 9 * MIB, "seconds": 60.0} | settings)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of four blocks of 1 MiB."""
    monkeypatch.setattr(disk_probe, "BLOCK_BYTES", MIB)
    monkeypatch.setattr(disk_probe, "_BATCH_BLOCKS", 4)


def faulty(plan: Callable[[Operation, int], Fault | None]) -> Callable[..., Store]:
    return lambda directory, **settings: FaultyStore(PosixStore(directory, **settings), plan)


def test_it_moves_all_it_may_each_way_in_whole_batches(scratch: Path) -> None:
    stores: list[Recorder] = []

    def make(directory: Path, **settings: Any) -> Any:
        stores.append(Recorder(PosixStore(directory, **settings)))
        return stores[-1]

    facts = probe(scratch, make=make)
    assert facts.error is None
    assert facts.moved_bytes == 8 * MIB
    assert facts.write_bytes_per_s is not None
    assert facts.read_bytes_per_s is not None
    assert min(facts.write_bytes_per_s, facts.read_bytes_per_s) > 0
    (store,) = stores
    assert sum(ticket.nbytes for ticket in store.written) == store.read_bytes == 8 * MIB
    assert store.live == 0  # all discarded
    assert 0 < store.peak_file_bytes <= 128 * MIB  # the store lays out at least 64 MiB
    assert os.listdir(scratch) == []


def test_it_ends_when_its_time_is_over(scratch: Path) -> None:
    assert probe(scratch, seconds=1e-9).moved_bytes == 4 * MIB  # one batch, which had begun


def test_no_more_is_written_than_may_be(scratch: Path) -> None:
    assert probe(scratch, most_bytes=2 * MIB).moved_bytes == 2 * MIB
    nothing = probe(scratch, most_bytes=MIB - 1)
    assert (nothing.moved_bytes, nothing.write_bytes_per_s, nothing.error) == (0, None, None)


def test_direct_io_is_told(scratch: Path) -> None:
    with closing(PosixStore(scratch)) as store:
        assert probe(scratch, most_bytes=0) == DiskFacts(direct=store.alignment > 1)


@pytest.mark.parametrize("number", [0, 3, 7])
def test_one_wrong_byte_is_found(number: int, scratch: Path) -> None:
    """The store compares a sample of each page, the probe all."""
    facts = probe(scratch, make=faulty(Plan({("read", number): Fault(flip_byte=12_345)})))
    assert "not all came back as they were written" in str(facts.error)
    assert facts.write_bytes_per_s is facts.read_bytes_per_s is None


def test_a_block_that_is_that_of_another_is_found(scratch: Path) -> None:
    facts = probe(scratch, make=lambda directory, **settings: Recorder(PosixStore(directory, **settings), stale=True))
    assert "not all came back as they were written" in str(facts.error)


@pytest.mark.parametrize("what", ["write", "read"])
def test_an_error_is_told(what: Operation, scratch: Path) -> None:
    facts = probe(scratch, make=faulty(Plan({(what, 5): Fault(error=OSError(errno.EIO, "injected"))})))
    assert "injected" in str(facts.error)


def test_a_disk_that_stands_still_is_told_and_hangs_nobody(scratch: Path) -> None:
    gate = threading.Event()
    held = faulty(lambda what, at: Fault(gate=gate) if what == "write" else None)
    facts = probe(scratch, make=held, timeout_s=0.05)
    gate.set()  # lets the worker end
    assert f"s while a transfer of {MIB} bytes was waited for: the device hangs" in str(facts.error)


def test_a_directory_that_is_gone(scratch: Path) -> None:
    facts = probe(scratch / "none")
    assert str(scratch / "none") in str(facts.error)


@pytest.mark.parametrize(
    ("free", "most"), [(None, 1 << 30), (1 << 50, 1 << 30), (1 << 30, 21_474_836), (100, 2), (0, 0)]
)
def test_a_share_of_what_is_free_and_no_more(free: int | None, most: int) -> None:
    assert probe_bytes(free) == most
