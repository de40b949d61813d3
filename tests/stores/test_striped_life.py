"""StripedStore among threads, forks, hanging disks and late ones, from the first transfer to close."""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from io_backends import (
    HostStore,
    PosixStore,
    Store,
    StoreBroken,
    StoreClosed,
    StoreStalled,
    StripedStore,
    TicketState,
)
from support.stores import WAIT_S, Held, buffer_of, in_child, pattern_at, read_back, write
from support.striped import NBYTES, Disk


@pytest.fixture
def disks(scratch: Path) -> list[Disk]:
    return [Disk(scratch), Disk(scratch), Disk(scratch)]


@pytest.fixture
def store(disks: list[Disk]) -> Iterator[StripedStore]:
    store = StripedStore([disk.store for disk in disks])
    yield store
    store.close()


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


def test_closing_with_writes_in_flight(scratch: Path) -> None:
    held = Held()
    store = StripedStore([held.store(scratch), held.store(scratch)])
    tickets = [store.write(buffer_of(pattern_at(0, NBYTES))) for _ in range(2)]
    held.await_begun(2)  # a worker that came late would take those behind its own along
    tickets += [store.write(buffer_of(pattern_at(0, NBYTES))) for _ in range(7)]
    store.abandon()
    held.release.set()
    store.close()
    store.close()
    states = [ticket.state for ticket in tickets]
    assert states == [TicketState.DONE] * 2 + [TicketState.FAILED] * 7
    for ticket in tickets[2:]:
        with pytest.raises(StoreClosed):
            ticket.wait(0)
    with pytest.raises(StoreClosed):
        store.write(buffer_of(pattern_at(0, NBYTES)))


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
