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


def probe(directory: Path, sizes: tuple[int, ...] = (MIB,), **settings: Any) -> DiskFacts:
    return probe_disk(directory, sizes, **{"threads": 2, "most_bytes": 8 * MIB, "seconds": 60.0} | settings)


def faulty(plan: Callable[[Operation, int], Fault | None]) -> Callable[..., Store]:
    return lambda directory, **settings: FaultyStore(PosixStore(directory, **settings), plan)


def test_each_size_moves_all_it_may_each_way(scratch: Path) -> None:
    stores: list[Recorder] = []

    def make(directory: Path, **settings: Any) -> Any:
        stores.append(Recorder(PosixStore(directory, **settings)))
        return stores[-1]

    facts = probe(scratch, (MIB, 4 * MIB), make=make)
    assert facts.error is None
    assert [(speed.block_bytes, speed.moved_bytes) for speed in facts.speeds] == [(MIB, 8 * MIB), (4 * MIB, 8 * MIB)]
    assert all(speed.write_bytes_per_s > 0 and speed.read_bytes_per_s > 0 for speed in facts.speeds)
    (store,) = stores
    assert sum(ticket.nbytes for ticket in store.written) == store.read_bytes == 16 * MIB
    assert store.live == 0  # all discarded
    assert 0 < store.peak_file_bytes <= 128 * MIB  # the store lays out at least 64 MiB
    assert os.listdir(scratch) == []


def test_it_ends_when_its_time_is_over(scratch: Path) -> None:
    facts = probe(scratch, seconds=1e-9)
    assert [speed.moved_bytes for speed in facts.speeds] == [MIB]  # one block, which had begun


def test_a_size_beyond_what_may_be_written_is_left_out(scratch: Path) -> None:
    facts = probe(scratch, (MIB, 16 * MIB), most_bytes=2 * MIB)
    assert [speed.block_bytes for speed in facts.speeds] == [MIB]
    assert probe(scratch, (MIB, 16 * MIB), most_bytes=0).speeds == ()


def test_direct_io_is_told(scratch: Path) -> None:
    facts = probe(scratch, ())
    with closing(PosixStore(scratch)) as store:
        assert facts == DiskFacts(alignment=store.alignment)
    assert facts.direct == (facts.alignment > 1)
    assert not DiskFacts(alignment=1).direct


@pytest.mark.parametrize("number", [0, 3, 7])
def test_one_wrong_byte_is_found(number: int, scratch: Path) -> None:
    """The store compares a sample of each page, the probe all."""
    wrong = faulty(lambda what, at: Fault(flip_byte=12_345) if (what, at) == ("read", number) else None)
    facts = probe(scratch, make=wrong)
    assert facts.error is not None
    assert "not all came back as they were written" in facts.error
    assert facts.speeds == ()


def test_a_block_that_is_that_of_another_is_found(scratch: Path) -> None:
    facts = probe(scratch, make=lambda directory, **settings: Recorder(PosixStore(directory, **settings), stale=True))
    assert facts.error is not None
    assert "they were written with" in facts.error


@pytest.mark.parametrize("what", ["write", "read"])
def test_an_error_is_told_and_what_was_measured_before_it_kept(what: Operation, scratch: Path) -> None:
    broken = faulty(
        lambda operation, at: Fault(error=OSError(errno.EIO, "injected")) if (operation, at) == (what, 9) else None
    )
    facts = probe(scratch, (MIB, 2 * MIB), make=broken)
    assert facts.error is not None
    assert "injected" in facts.error
    assert [speed.block_bytes for speed in facts.speeds] == [MIB]


def test_a_disk_that_stands_still_is_told_and_hangs_nobody(scratch: Path) -> None:
    gate = threading.Event()
    held = faulty(lambda what, at: Fault(gate=gate) if what == "write" else None)
    facts = probe(scratch, make=held, timeout_s=0.05)
    gate.set()  # lets the worker end
    assert facts.error is not None
    assert f"s while a transfer of {MIB} bytes was waited for: the device hangs" in facts.error


def test_a_directory_that_is_gone(scratch: Path) -> None:
    facts = probe(scratch / "none")
    assert facts.error is not None
    assert str(scratch / "none") in facts.error


@pytest.mark.parametrize(
    ("free", "most"), [(None, 1 << 30), (1 << 50, 1 << 30), (1 << 30, 21_474_836), (100, 2), (0, 0)]
)
def test_a_share_of_what_is_free_and_no_more(free: int | None, most: int) -> None:
    assert probe_bytes(free) == most
