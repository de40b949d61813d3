"""Queued writes that one system call moves: every byte, every error with whom it belongs to, and nothing kept."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from io_backends import (
    Corrupted,
    PosixStore,
    StoreBroken,
    StoreFull,
    Ticket,
    TicketState,
)
from io_backends._extents import align_up
from io_backends._file.batch_writer import MOST_BYTES, MOST_TICKETS
from io_backends._testing.probe import Gate, error_of
from support.stores import WAIT_S, Bytes, Calls, Held, Pieces, buffer_of, cut, empty_at, pattern_at, read_back, write

MIB = 1 << 20
SHAPES = [(0, MIB), (64, MIB), (511, 3 * 4096 + 5), (4000, MIB + 77), (512, 8192), (0, 1)]  # skew, nbytes


class Queue:
    """A store whose only worker is held back, so that what is written meanwhile waits together."""

    def __init__(self, store: PosixStore) -> None:
        self.store = store
        self._gate = Gate()
        self._held = store.write(buffer_of(pattern_at(0, 1)), before=self._gate)
        assert self._gate.begun.acquire(timeout=WAIT_S)

    def release(self) -> None:
        self._gate.open.set()
        assert self._held.wait(WAIT_S)
        self.store.discard(self._held)


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def store(scratch: Path, calls: Calls) -> Iterator[PosixStore]:
    store = PosixStore(scratch, threads=1, syscalls=calls.syscalls)
    yield store
    store.close()


def arrays_of(shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Bytes]:
    return [pattern_at(skew, nbytes, seed) for seed, (skew, nbytes) in enumerate(shapes)]


def queued(store: PosixStore, arrays: Sequence[Bytes]) -> list[Ticket]:
    """Written while the worker was held back, and ended."""
    queue = Queue(store)
    tickets = [store.write(buffer_of(array)) for array in arrays]
    queue.release()
    for ticket in tickets:
        error_of(ticket)
    return tickets


def test_what_waits_together_goes_in_one_call_and_is_read_alone(store: PosixStore, calls: Calls) -> None:
    arrays = arrays_of()
    tickets = queued(store, arrays)
    assert len(calls.writes) == 1
    begins = [ticket.location.offset for ticket in tickets]
    ends = [ticket.location.offset + ticket.location.length for ticket in tickets]
    assert begins[1:] == ends[:-1], "side by side"
    assert calls.writes == [(begins[0], ends[-1] - begins[0])]
    for padded in (True, False):
        for ticket, array in zip(tickets, arrays, strict=True):
            assert np.array_equal(read_back(store, ticket, padded=padded), array)
    for ticket, array in zip(tickets, arrays, strict=True):
        alone = write(store, array)
        assert ticket.location._replace(offset=0) == alone.location._replace(offset=0)
        assert ticket.moved_bytes == alone.moved_bytes
        assert 0 < ticket.started_s <= ticket.ended_s
        assert ticket.state is TicketState.DONE
        store.discard(alone)


def test_each_is_discarded_by_itself(store: PosixStore) -> None:
    arrays = arrays_of()
    tickets = queued(store, arrays)
    for ticket in tickets[::2]:
        store.discard(ticket)
    assert store.used_bytes == sum(ticket.location.length for ticket in tickets[1::2])
    fresh = [write(store, pattern_at(64, MIB, 77 + number)) for number in range(3)]
    for ticket, array in zip(tickets[1::2], arrays[1::2], strict=True):
        assert np.array_equal(read_back(store, ticket), array)
    for ticket in [*tickets, *fresh]:
        store.discard(ticket)
    assert store.used_bytes == 0


@pytest.mark.parametrize("how", ["error", "short", "long ago full", "not of this world"])
def test_where_one_call_cannot_each_goes_by_itself(store: PosixStore, calls: Calls, how: str) -> None:
    arrays = arrays_of(SHAPES[:4])
    length = sum(align_up(skew + nbytes, 4096) for skew, nbytes in SHAPES[:4])

    def instead(real: Callable[..., int], fd: int, pieces: Pieces, offset: int) -> int:
        if sum(nbytes for _, nbytes in pieces) < length:
            return real(fd, pieces, offset)
        if how == "short":
            return real(fd, cut(pieces, 3 * 4096), offset)
        if how == "not of this world":
            raise SystemExit("no OSError at all")
        raise OSError(errno.EIO if how == "error" else errno.ENOSPC, "told to fail")

    calls.instead = instead
    tickets = queued(store, arrays)
    assert [nbytes for _, nbytes in calls.writes] == [length, *(ticket.moved_bytes for ticket in tickets)]
    for ticket, array in zip(tickets, arrays, strict=True):
        assert np.array_equal(read_back(store, ticket), array)
        store.discard(ticket)
    assert store.used_bytes == 0


def test_an_error_strikes_the_one_it_belongs_to(store: PosixStore, calls: Calls) -> None:
    arrays = arrays_of(SHAPES[:4])
    bad = arrays[1].ctypes.data // 4096

    def instead(real: Callable[..., int], fd: int, pieces: Pieces, offset: int) -> int:
        if any(address // 4096 <= bad + 1 < (address + nbytes) // 4096 for address, nbytes in pieces):
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return real(fd, pieces, offset)

    calls.instead = instead
    good = [0, 2, 3]
    tickets = queued(store, arrays)
    assert isinstance(error_of(tickets[1]), StoreBroken)
    for place in good:
        assert np.array_equal(read_back(store, tickets[place]), arrays[place])
    for ticket in tickets:
        store.discard(ticket)
    assert store.used_bytes == 0


def test_those_that_fit_are_written_where_all_would_not(scratch: Path) -> None:
    store = PosixStore(scratch, threads=1, capacity_bytes=3 * MIB)
    arrays = arrays_of([(0, 2 * MIB), (0, 2 * MIB), (0, MIB - 8192)])
    tickets = queued(store, arrays)
    assert [type(error_of(ticket)) for ticket in tickets] == [type(None), StoreFull, type(None)]
    for place in (0, 2):
        assert np.array_equal(read_back(store, tickets[place]), arrays[place])
    store.close()


def test_no_more_at_once_than_a_reader_may_wait_for(store: PosixStore, calls: Calls) -> None:
    half = MOST_BYTES // 2
    queued(store, arrays_of([(0, half), (0, half), (0, half), (0, MIB), (0, half)]))
    assert [nbytes for _, nbytes in calls.writes] == [MOST_BYTES, half + MIB, half]
    calls.writes.clear()
    queued(store, arrays_of([(64, 8192)] * (MOST_TICKETS + 3)))
    assert [nbytes // (3 * 4096) for _, nbytes in calls.writes] == [MOST_TICKETS, 3]


def test_what_has_to_wait_for_something_goes_alone_and_in_its_turn(store: PosixStore, calls: Calls) -> None:
    arrays, order = arrays_of([(0, MIB)] * 5), list[str]()
    queue = Queue(store)
    tickets = [store.write(buffer_of(array)) for array in arrays[:2]]
    tickets.append(store.write(buffer_of(arrays[2]), before=lambda: order.append(f"after {len(calls.writes)} calls")))
    tickets += [store.write(buffer_of(array)) for array in arrays[3:]]
    queue.release()
    for ticket, array in zip(tickets, arrays, strict=True):
        assert ticket.wait(WAIT_S)
        assert np.array_equal(read_back(store, ticket), array)
    assert [nbytes for _, nbytes in calls.writes] == [2 * MIB, MIB, 2 * MIB]
    assert order == ["after 1 calls"]


def test_a_store_that_paces_its_bytes_gathers_nothing(scratch: Path, calls: Calls) -> None:
    store = PosixStore(scratch, threads=1, syscalls=calls.syscalls, write_rate_bytes_per_s=1e9)
    arrays = arrays_of([(64, MIB)] * 3)
    tickets = queued(store, arrays)
    assert len(calls.writes) == 3
    for ticket, array in zip(tickets, arrays, strict=True):
        assert np.array_equal(read_back(store, ticket), array)
    store.close()


@pytest.mark.parametrize("checksum", [True, False])
def test_each_of_many_has_its_own_checksum(scratch: Path, calls: Calls, checksum: bool) -> None:
    store = PosixStore(scratch, threads=1, syscalls=calls.syscalls, checksum=checksum)
    arrays = arrays_of()
    tickets = queued(store, arrays)
    assert len(calls.writes) == 1
    for ticket, array in zip(tickets, arrays, strict=True):
        assert np.array_equal(read_back(store, ticket), array)
    first, second = (tickets[index].location for index in (0, 1))
    with pytest.raises(Corrupted):
        store.read(first._replace(offset=second.offset), buffer_of(empty_at(0, MIB))).wait(WAIT_S)
    store.close()


def test_where_workers_are_idle_each_gets_its_share(scratch: Path) -> None:
    held = Held()
    store = held.store(scratch, threads=3)
    tickets = [store.write(buffer_of(array)) for array in arrays_of([(0, MIB)] * 3)]
    held.await_begun(3)  # three calls at once, or the test fails
    held.release.set()
    assert all(ticket.wait(WAIT_S) for ticket in tickets)
    store.close()


def test_reads_go_ahead_also_where_each_goes_by_itself(store: PosixStore, calls: Calls) -> None:
    array, copy = pattern_at(0, MIB), pattern_at(0, MIB, 5)
    written = write(store, array)
    order, reads = list[str](), list[Ticket]()

    def instead(real: Callable[..., int], fd: int, pieces: Pieces, offset: int) -> int:
        if sum(nbytes for _, nbytes in pieces) > 2 * MIB:
            raise OSError(errno.EIO, "told to fail")
        if not reads:  # asked for while the first of them is written
            reads.append(store.read(written.location, buffer_of(copy), on_done=lambda _: order.append("read")))
        return real(fd, pieces, offset)

    calls.instead = instead
    queue = Queue(store)
    each = arrays_of([(0, MIB)] * 4)
    tickets = [store.write(buffer_of(one), on_done=lambda _: order.append("write")) for one in each]
    queue.release()
    assert all(ticket.wait(WAIT_S) for ticket in [*tickets, *reads])
    assert order == ["write", "read", *["write"] * 3]
    assert np.array_equal(copy, array)


def test_each_one_s_memory_goes_when_the_call_has_ended_and_callbacks_run_once(store: PosixStore) -> None:
    arrays, done = arrays_of(), list[Ticket]()
    watched = [weakref.ref(array) for array in arrays]
    queue = Queue(store)
    tickets = [store.write(buffer_of(array), on_done=done.append) for array in arrays]
    del arrays[:]
    assert all(each() is not None for each in watched)
    queue.release()
    assert all(ticket.wait(WAIT_S) for ticket in tickets)
    with store._workers.held():
        assert [each() for each in watched] == [None] * len(tickets)
    assert done == tickets
