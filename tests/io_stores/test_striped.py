"""StripedStore: writes are spread, reads find them, a failed write is an error; among threads, forks and closes."""

from __future__ import annotations

import errno
import gc
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from io_backends import (
    Buffer,
    HostStore,
    PosixStore,
    Store,
    StoreBroken,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreStalled,
    StripedStore,
    Ticket,
    TicketState,
)
from io_backends.testing import Fault, FaultyStore
from support.stores import WAIT_S, Held, buffer_of, empty_at, in_child, pattern_at, read_back, write
from support.striped import NBYTES, Disk, index_of


@pytest.fixture
def disks(scratch: Path) -> list[Disk]:
    return [Disk(scratch), Disk(scratch), Disk(scratch)]


@pytest.fixture
def store(disks: list[Disk]) -> Iterator[StripedStore]:
    store = StripedStore([disk.store for disk in disks])
    yield store
    store.close()


def test_writes_are_spread_and_reads_find_them(store: StripedStore, disks: list[Disk]) -> None:
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
    with pytest.raises(ValueError, match="nothing to read there"):
        store.read(tickets[0].location, buffer_of(empty_at(0, NBYTES)))


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, StoreFull), (errno.EIO, StoreBroken)])
def test_a_failed_write_is_not_tried_on_another_store(
    store: StripedStore, disks: list[Disk], code: int, kind: type[StoreError]
) -> None:
    disks[0].code = code
    done: list[tuple[BaseException | None, bool]] = []
    array = pattern_at(100, NBYTES)
    watched = weakref.ref(array)
    ticket = store.write(buffer_of(array), on_done=lambda t: done.append((t.error, t.buffer is not None)))
    del array
    with pytest.raises(kind) as caught:
        ticket.wait(WAIT_S)
    assert ticket.state is TicketState.FAILED
    assert done == [(caught.value, True)]
    assert ticket.location is None
    assert [disk.calls for disk in disks] == [1, 0, 0]
    with disks[0].store._workers.held():  # it may still be on its way back
        pass
    gc.collect()
    assert watched() is None
    store.discard(ticket)
    assert store.used_bytes == 0


def test_a_failed_store_is_left_alone_and_comes_back(store: StripedStore, disks: list[Disk]) -> None:
    array = pattern_at(0, NBYTES)
    disks[0].code = errno.ENOSPC
    failed = store.write(buffer_of(array))
    with pytest.raises(StoreFull):
        failed.wait(WAIT_S)
    store.discard(failed)
    for code in (errno.ENOSPC, 0):
        disks[0].code = code
        for _ in range(6):
            assert index_of(write(store, array)) != 0  # it rests
    assert disks[0].calls == 1
    for lane in store._lanes:
        lane.catch_up()
        lane.rests_until_s = 0.0
    assert disks[0].store.used_bytes == 0
    for ticket in [store.write(buffer_of(array)) for _ in range(40)]:  # at once, so that none is enough for all
        assert ticket.wait(WAIT_S)
    assert disks[0].store.used_bytes > 0


def test_a_store_that_cannot_begin_refuses_one_write_and_rests(scratch: Path) -> None:
    store = StripedStore([PosixStore(scratch / "nowhere"), PosixStore(scratch)])
    array = pattern_at(64, NBYTES)
    with pytest.raises(StoreBroken, match=r"cannot make a scratch file in .*nowhere"):
        store.write(buffer_of(array))
    for _ in range(5):
        ticket = write(store, array)
        assert index_of(ticket) == 1
        assert np.array_equal(read_back(store, ticket, padded=False), array)
    store.close()


def test_a_ticket_tells_what_its_transfer_took(store: StripedStore) -> None:
    ticket = write(store, pattern_at(0, NBYTES))
    inner = ticket.inner  # type: ignore[attr-defined]
    assert inner.cpu_s > 0
    for name in ("moved_bytes", "started_s", "ended_s", "cpu_s"):
        assert getattr(ticket, name) == getattr(inner, name)


def test_a_callback_may_discard_the_write_that_has_ended(scratch: Path) -> None:
    """It may come before the submitter has its ticket."""
    gate = threading.Event()

    class Slow(PosixStore):
        def submit_write(self, buffer: Buffer, *callbacks: Any) -> Ticket:
            ticket = super().submit_write(buffer, *callbacks)
            assert gate.wait(WAIT_S)
            return ticket

    def discard(ticket: Ticket) -> None:
        store.discard(ticket)
        gate.set()

    store = StripedStore([Slow(scratch)])
    ticket = store.write(buffer_of(pattern_at(0, NBYTES)), on_done=discard)
    assert ticket.wait(WAIT_S)
    assert ticket.location is None
    store.close()
    assert store.used_bytes == 0


def test_a_write_discarded_while_it_fails_gives_its_space_back(scratch: Path) -> None:
    gate, begun = threading.Event(), threading.Event()
    faulty = FaultyStore(PosixStore(scratch), lambda operation, number: Fault(gate=gate, error=OSError(5, "I/O")))
    store = StripedStore([faulty])
    ticket = store.write(buffer_of(pattern_at(0, NBYTES)), before=begun.set)
    assert begun.wait(WAIT_S)
    store.discard(ticket)
    gate.set()
    with pytest.raises(StoreBroken):
        ticket.wait(WAIT_S)
    assert store.used_bytes == 0
    store.close()


# -- life ----------------------------------------------------------------------------------------------------------


def test_a_store_that_hangs_is_noticed_by_those_who_wait(scratch: Path) -> None:
    held = Held()
    store = StripedStore([PosixStore(scratch, timeout_s=0.2, syscalls=held.syscalls)])
    ticket = store.write(buffer_of(pattern_at(0, NBYTES)))
    held.await_begun()
    with pytest.raises(StoreStalled, match="no byte of the store has moved"):
        ticket.wait()
    assert not ticket.done()
    held.release.set()
    assert ticket.wait(WAIT_S)
    store.close()


def test_blocks_larger_than_the_padding_are_not_written_beside_a_padded_read(scratch: Path) -> None:
    disk = PosixStore(scratch)
    store = StripedStore([disk])
    disk._file = disk.open()._replace(alignment=2 * store.alignment)
    ticket = write(store, pattern_at(1024, 5000))
    around = pattern_at(0, 5 * 4096, seed=1)
    target = around[4096 + 1024 : 4096 + 6024]
    before = around.copy()
    assert store.read(ticket.location, buffer_of(target, padded=True)).wait(WAIT_S)
    assert np.array_equal(target, pattern_at(1024, 5000))
    assert np.array_equal(around[: 4096 + 1024], before[: 4096 + 1024])
    assert np.array_equal(around[4096 + 6024 :], before[4096 + 6024 :])
    store.close()


def test_trim_reaches_every_store(scratch: Path) -> None:
    trimmed: list[int] = []

    class Trimming(PosixStore):
        def trim(self) -> None:
            trimmed.append(id(self))

    stores: list[Store] = [Trimming(scratch), HostStore(), Trimming(scratch)]
    store = StripedStore(stores)
    store.trim()
    assert trimmed == [id(stores[0]), id(stores[2])]
    store.close()


def test_a_striped_store_needs_a_store() -> None:
    with pytest.raises(ValueError, match="at least one store, got none"):
        StripedStore([])


def test_many_threads_over_disks_that_come_and_go(store: StripedStore, disks: list[Disk]) -> None:
    wrong: list[str] = []
    stop = threading.Event()

    def upset() -> None:
        turn = 0
        while not stop.wait(0.002):
            turn += 1
            for index, disk in enumerate(disks):
                disk.code = errno.EIO if turn % 3 == index else 0
            for lane in store._lanes:
                lane.rests_until_s = 0.0

    def work(number: int) -> None:
        for turn in range(60):
            array = pattern_at(number * 64, 60_000 + turn, turn)
            ticket = store.write(buffer_of(array))
            if turn % 5 == 0:
                store.discard(ticket)
                continue
            try:
                assert ticket.wait(WAIT_S)
            except StoreBroken:
                pass  # the disk that it went to
            else:
                if not np.array_equal(read_back(store, ticket, padded=False), array):
                    wrong.append(f"thread {number}, turn {turn}")
            store.discard(ticket)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    upsetter = threading.Thread(target=upset)
    upsetter.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    upsetter.join()
    assert wrong == []
    store.close()
    assert store.used_bytes == 0
    for lane in store._lanes:
        lane.catch_up()
        assert lane.in_flight_bytes == 0


def test_a_fork_while_another_thread_chooses(scratch: Path) -> None:
    store = StripedStore([PosixStore(scratch), PosixStore(scratch)])
    array = pattern_at(0, NBYTES)
    write(store, array)

    def child() -> str:
        try:
            store.write(buffer_of(array))
        except StoreClosed:
            return "closed"
        return "went on"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with store._lock:  # for the child as good as another thread's
            assert in_child(child) == "closed"
    assert np.array_equal(read_back(store, write(store, array), padded=False), array)
    store.close()
