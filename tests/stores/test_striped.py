"""StripedStore: writes go on with the stores that are left, reads go where the bytes are, nothing is lost or kept."""

from __future__ import annotations

import errno
import gc
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from io_backends import (
    PosixStore,
    StoreBroken,
    StoreError,
    StoreFull,
    StripedStore,
    Ticket,
    TicketState,
    TransferCancelled,
)
from io_backends.testing import Fault, FaultyStore
from support.stores import WAIT_S, Held, buffer_of, empty_at, pattern_at, read_back, write
from support.striped import NBYTES, Disk, Reporting, index_of


@pytest.fixture
def disks(scratch: Path) -> list[Disk]:
    return [Disk(scratch), Disk(scratch), Disk(scratch)]


@pytest.fixture
def store(disks: list[Disk]) -> Iterator[Reporting]:
    store = Reporting([disk.store for disk in disks])
    yield store
    store.close()


def test_writes_are_spread_and_reads_find_them(store: Reporting, disks: list[Disk]) -> None:
    arrays = [pattern_at(64 * seed, NBYTES + seed, seed) for seed in range(30)]
    tickets = [store.write(buffer_of(array)) for array in arrays]
    for ticket, array in zip(tickets, arrays, strict=True):
        assert ticket.wait(WAIT_S)
        assert ticket.moved_bytes >= array.nbytes
        assert np.array_equal(read_back(store, ticket, padded=False), array)
        padded = empty_at(ticket.location.skew, array.nbytes)
        assert store.read(ticket.location, buffer_of(padded, padded=True)).wait(WAIT_S)
        assert np.array_equal(padded, array)
    assert {index_of(ticket) for ticket in tickets} == {0, 1, 2}
    assert store.used_bytes == sum(disk.store.used_bytes for disk in disks) > 0
    assert store.allocated_bytes() == sum(disk.store.allocated_bytes() for disk in disks) > 0
    for ticket in tickets * 2:
        store.discard(ticket)
    assert store.used_bytes == 0
    with pytest.raises(ValueError, match="asked to read what is not there"):
        store.read(tickets[0].location, buffer_of(empty_at(0, NBYTES)))


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, StoreFull), (errno.EIO, StoreBroken)])
def test_a_failed_write_is_tried_on_another_store(
    store: Reporting, disks: list[Disk], code: int, kind: type[StoreError]
) -> None:
    disks[0].code = disks[1].code = code
    done: list[tuple[BaseException | None, bool]] = []
    before: list[bool] = []
    array = pattern_at(100, NBYTES)
    tickets = [
        store.write(
            buffer_of(array),
            before=lambda: before.append(True),
            on_done=lambda t: done.append((t.error, t.buffer is not None)),
        )
        for _ in range(12)
    ]
    for ticket in tickets:
        assert ticket.wait(WAIT_S)
        assert index_of(ticket) == 2
        assert np.array_equal(read_back(store, ticket, padded=False), array)
    assert len(before) == 12  # once for each write, not for each attempt
    assert done == [(None, True)] * 12
    assert sorted(index for index, _ in store.heard) == [0, 1]  # once for each store, not for each write
    assert all(type(error) is kind for _, error in store.heard)
    assert [disk.store.used_bytes for disk in disks[:2]] == [0, 0]  # what failed there is given back


def test_a_failed_store_is_left_alone_and_comes_back(store: Reporting, disks: list[Disk]) -> None:
    array = pattern_at(0, NBYTES)
    disks[0].code = errno.ENOSPC
    for _ in range(6):
        write(store, array)
    assert disks[0].calls == 1
    disks[0].code = 0
    for _ in range(6):
        write(store, array)
    assert disks[0].calls == 1  # it rests
    for lane in store._lanes:
        lane.rests_until_s = 0.0
    assert disks[0].store.used_bytes == 0
    for ticket in [store.write(buffer_of(array)) for _ in range(40)]:  # at once, so that none is enough for all
        assert ticket.wait(WAIT_S)
    assert disks[0].store.used_bytes > 0
    assert [index for index, _ in store.heard] == [0]
    disks[0].code = errno.EIO
    for ticket in [store.write(buffer_of(array)) for _ in range(40)]:
        assert ticket.wait(WAIT_S)
    assert [index for index, _ in store.heard] == [0, 0]  # well again in between, so it is news


def test_where_all_fail_the_first_error_is_the_ticket_s(store: Reporting, disks: list[Disk]) -> None:
    for disk in disks:
        disk.code = errno.ENOSPC
    array = pattern_at(0, NBYTES)
    watched = weakref.ref(array)
    ticket = store.write(buffer_of(array))
    del array
    with pytest.raises(StoreFull, match="no space left"):
        ticket.wait(WAIT_S)
    assert ticket.state is TicketState.FAILED
    assert [disk.calls for disk in disks] == [1, 1, 1]
    assert ticket.error is store.heard[0][1]
    for disk_store in store.stores:  # one that passed the write on may still be on its way back
        with disk_store._workers.held():  # type: ignore[attr-defined]
            pass
    gc.collect()
    assert watched() is None
    store.discard(ticket)
    assert store.used_bytes == 0
    for disk in disks:
        disk.code = 0
    assert np.array_equal(read_back(store, write(store, pattern_at(0, NBYTES)), padded=False), pattern_at(0, NBYTES))


def test_a_path_that_is_not_there_is_passed_over(scratch: Path) -> None:
    stores = [PosixStore(scratch / "nowhere"), PosixStore(scratch)]
    store = Reporting(stores)
    array = pattern_at(64, NBYTES)
    for _ in range(5):
        ticket = write(store, array)
        assert index_of(ticket) == 1
        assert np.array_equal(read_back(store, ticket, padded=False), array)
    assert [index for index, _ in store.heard] == [0]
    assert "cannot make a scratch file" in str(store.heard[0][1])
    store.close()
    nowhere = Reporting([PosixStore(scratch / "nowhere"), PosixStore(scratch / "neither")])
    with pytest.raises(StoreBroken, match=r"cannot make a scratch file in .*nowhere"):
        nowhere.write(buffer_of(array))
    nowhere.close()


def test_an_attempt_that_could_not_begin_keeps_nothing_of_the_submitter_s(scratch: Path) -> None:
    """The error that is kept has no traceback, whose frames would hold what the submitter had."""
    store = Reporting([PosixStore(scratch / "nowhere"), PosixStore(scratch)])

    def submit() -> tuple[Ticket, weakref.ref[Disk]]:
        local = Disk(scratch)
        return store.write(buffer_of(pattern_at(0, NBYTES))), weakref.ref(local)

    ticket, watched = submit()
    assert ticket.wait(WAIT_S)
    assert [index for index, _ in store.heard] == [0]
    gc.collect()
    assert watched() is None
    store.close()


def test_there_is_a_warning_and_it_may_be_an_error(scratch: Path) -> None:
    disks = [Disk(scratch), Disk(scratch)]
    disks[0].code = errno.EIO
    store = StripedStore([disk.store for disk in disks])
    array = pattern_at(0, NBYTES)
    ticket = write(store, array)  # on a worker, where nobody could catch what the filter makes of it
    assert np.array_equal(read_back(store, ticket, padded=False), array)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store._warn(1, StoreFull("no space left"))
    assert [str(w.message) for w in caught] == ["storage path 2 of 2 failed (no space left); going on with the others"]
    store.close()


def test_an_error_of_the_caller_s_own_is_no_store_s_fault(store: Reporting, disks: list[Disk]) -> None:
    def before() -> None:
        raise RuntimeError("the device is gone")

    ticket = store.write(buffer_of(pattern_at(0, NBYTES)), before=before)
    with pytest.raises(StoreBroken, match="the device is gone"):
        ticket.wait(WAIT_S)
    assert store.heard == []
    assert [disk.calls for disk in disks] == [0, 0, 0]


def test_a_write_discarded_while_it_fails_is_not_tried_again(scratch: Path) -> None:
    gate, begun = threading.Event(), threading.Event()
    faulty = FaultyStore(PosixStore(scratch), lambda operation, number: Fault(gate=gate, error=OSError(5, "I/O")))
    other = Disk(scratch)
    store = Reporting([faulty, other.store])
    ticket = store.write(buffer_of(pattern_at(0, NBYTES)), before=begun.set)
    assert begun.wait(WAIT_S)
    store.discard(ticket)
    gate.set()
    with pytest.raises(StoreBroken):
        ticket.wait(WAIT_S)
    assert other.calls == 0
    assert store.used_bytes == 0
    store.close()


def test_a_write_discarded_while_it_succeeds_gives_its_space_back(scratch: Path) -> None:
    held = Held()
    store = StripedStore([held.store(scratch)])
    ticket = store.write(buffer_of(pattern_at(0, NBYTES)))
    held.await_begun()
    for _ in range(2):
        store.discard(ticket)
    assert store.used_bytes > 0
    held.release.set()
    assert ticket.wait(WAIT_S)
    store.close()  # the worker has left the ticket
    assert store.used_bytes == 0


def test_a_queued_write_is_cancelled_beneath_too(scratch: Path) -> None:
    held = Held()
    store = StripedStore([held.store(scratch)])
    running = store.write(buffer_of(pattern_at(0, NBYTES)))
    held.await_begun()
    array = pattern_at(0, NBYTES)
    watched = weakref.ref(array)
    queued = store.write(buffer_of(array))
    del array
    assert queued.cancel()
    assert watched() is None
    assert not running.cancel()
    with pytest.raises(TransferCancelled):
        queued.wait(0)
    held.release.set()
    assert running.wait(WAIT_S)
    for ticket in (running, queued):
        store.discard(ticket)
    store.close()
    assert store.used_bytes == 0
    store._lanes[0].catch_up()
    assert store._lanes[0].in_flight_bytes == 0


def test_a_second_attempt_is_not_cancelled(scratch: Path) -> None:
    """It is queued on another store; but callbacks have run, so the write has begun."""
    held = Held()
    full = Disk(scratch)
    full.code = errno.ENOSPC
    other = held.store(scratch)
    store = Reporting([full.store, other])
    blocker = other.write(buffer_of(pattern_at(0, NBYTES)))
    held.await_begun()
    array = pattern_at(0, NBYTES)
    ticket = store.write(buffer_of(array))
    while not store.heard or ticket.inner is None or ticket.index != 1:  # type: ignore[attr-defined]
        assert not ticket.wait(0.001)
    assert not ticket.cancel()
    assert ticket.state is TicketState.RUNNING
    held.release.set()
    assert blocker.wait(WAIT_S)
    assert ticket.wait(WAIT_S)
    assert np.array_equal(read_back(store, ticket, padded=False), array)
    store.close()
