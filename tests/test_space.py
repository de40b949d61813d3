"""Space: a file grows with what is stored, shrinks when a step needs less; no hole is ever punched under a write."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_tools import WAIT_S, Bytes, Failing, Held, buffer_of, pattern_at, read_back, write

from io_backends import PosixStore, StoreFull, Syscalls, Ticket
from io_backends._space import GROWTH_BYTES

MIB = 1 << 20
REAL = Syscalls()
BLOCK = pattern_at(64, 16 * MIB - 4096)  # 16 MiB of file


class Punching:
    """Holes punched, as (offset, length); each waits until `release` is set."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.begun = threading.Event()
        self.release = threading.Event()
        self.release.set()

    def __call__(self, fd: int, offset: int, length: int) -> None:
        self.seen.append((offset, length))
        self.begun.set()
        assert self.release.wait(WAIT_S)
        REAL.punch(fd, offset, length)


@pytest.fixture
def punching() -> Punching:
    return Punching()


@pytest.fixture
def store(scratch: Path, punching: Punching) -> Iterator[PosixStore]:
    store = PosixStore(scratch, syscalls=Syscalls(punch=punching))
    store.open()
    yield store
    punching.release.set()
    store.close()


def step(store: PosixStore, count: int) -> None:
    """Write `count` times 16 MiB, read all back, discard."""
    tickets = [store.write(buffer_of(BLOCK)) for _ in range(count)]
    for ticket in tickets:
        assert ticket.wait(WAIT_S)
    assert np.array_equal(read_back(store, tickets[-1]), BLOCK)
    for ticket in tickets:
        store.discard(ticket)


def settle(store: PosixStore) -> None:
    """Until the workers have done what was queued."""
    write_and_discard = write(store, pattern_at(0, 1))
    store.discard(write_and_discard)
    with store._workers.held():
        pass


def test_the_file_shrinks_after_a_big_step(store: PosixStore, punching: Punching) -> None:
    step(store, 16)
    big = store.allocated_bytes()
    assert big >= 256 * MIB
    store.trim()  # the last step was the big one
    settle(store)
    assert store.allocated_bytes() == big
    for _ in range(3):
        step(store, 3)
        store.trim()
        settle(store)
        assert GROWTH_BYTES <= store.allocated_bytes() < GROWTH_BYTES + MIB
    assert len(punching.seen) == 1
    step(store, 16)
    assert store.allocated_bytes() == big
    assert store.used_bytes == 0


def test_steps_of_about_one_size_punch_nothing(store: PosixStore, punching: Punching) -> None:
    for count in (9, 10, 9, 11, 10, 9):
        step(store, count)
        store.trim()
    settle(store)
    assert punching.seen == []


def test_a_step_that_stores_nothing_leaves_the_file_its_first_blocks(store: PosixStore, punching: Punching) -> None:
    step(store, 1)
    for _ in range(3):
        store.trim()  # its writes may be late, or all have gone to another of several stores
    settle(store)
    assert punching.seen == []
    assert store.allocated_bytes() >= GROWTH_BYTES


def test_what_is_still_stored_survives_wherever_it_lies(store: PosixStore, punching: Punching) -> None:
    tickets = [store.write(buffer_of(BLOCK)) for _ in range(20)]
    for ticket in tickets:
        assert ticket.wait(WAIT_S)
    kept = [ticket for ticket in tickets if ticket.location.offset // (16 * MIB) in (7, 13, 19)]
    assert len(kept) == 3
    for ticket in tickets:
        if ticket not in kept:
            store.discard(ticket)
    store.trim()
    step(store, 1)
    store.trim()
    settle(store)
    assert punching.seen
    assert store.allocated_bytes() < 64 * MIB + 3 * 16 * MIB + MIB
    for ticket in kept:
        assert np.array_equal(read_back(store, ticket), BLOCK)
    seen = len(punching.seen)
    step(store, 1)
    store.trim()  # holes are there already
    settle(store)
    assert len(punching.seen) == seen
    step(store, 20)  # into the holes and beyond
    for ticket in kept:
        assert np.array_equal(read_back(store, ticket), BLOCK)
        store.discard(ticket)
    assert store.used_bytes == 0


def test_a_write_during_a_punch_goes_elsewhere(store: PosixStore, punching: Punching) -> None:
    step(store, 16)
    store.trim()
    step(store, 1)
    punching.release.clear()
    store.trim()
    assert punching.begun.wait(WAIT_S)
    ((offset, length),) = punching.seen
    assert store.used_bytes == 0
    store.trim()  # one at a time
    below = [store.write(buffer_of(BLOCK)) for _ in range(4)]
    for ticket in below:
        assert ticket.wait(WAIT_S)
        assert ticket.location.offset + ticket.location.length <= offset
    beyond = store.write(buffer_of(BLOCK))  # needs space that is being punched, or new one
    while beyond.location is None:
        assert not beyond.wait(0.001)
    assert beyond.location.offset >= offset + length
    punching.release.set()
    more = [store.write(buffer_of(BLOCK)) for _ in range(8)]
    for ticket in (*below, beyond, *more):
        assert ticket.wait(WAIT_S)
        assert np.array_equal(read_back(store, ticket), BLOCK)
    assert len(punching.seen) == 1


def test_many_threads_while_holes_are_punched(store: PosixStore, punching: Punching) -> None:
    """Bytes are compared after every trim: a punch under a write or a live extent would give zeros."""
    wrong: list[str] = []
    source = pattern_at(7, 40 * MIB, seed=3)

    def work(number: int) -> None:
        live: list[tuple[Ticket, Bytes]] = []
        for turn in range(25):
            size = (30 if turn % 5 == 0 else 1) * MIB + number
            array = source[number : number + size]
            live.append((store.write(buffer_of(array)), array))
            store.trim()
            while len(live) > 2:
                ticket, expected = live.pop(0)
                assert ticket.wait(WAIT_S)
                if not np.array_equal(read_back(store, ticket), expected):
                    wrong.append(f"thread {number}, turn {turn}")
                store.discard(ticket)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert punching.seen


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_that_cannot_punch_is_not_asked_again(scratch: Path, code: int) -> None:
    failing = Failing(REAL.punch, errno.EINTR, code)
    store = PosixStore(scratch, syscalls=Syscalls(punch=failing))
    for count in (16, 1, 16, 1, 1):
        step(store, count)
        store.trim()
        settle(store)
    assert failing.calls == 2
    assert store.used_bytes == 0
    step(store, 16)
    store.close()


def test_trim_costs_nothing_where_there_is_nothing_to_trim(scratch: Path) -> None:
    store = PosixStore(scratch)
    store.trim()
    assert store._file is None
    write(store, pattern_at(0, 10))
    store.trim()
    store.close()
    store.trim()
    assert store.allocated_bytes() == 0


def test_a_discarded_write_in_flight_is_not_punched(scratch: Path) -> None:
    held = Held()
    punching = Punching()
    store = PosixStore(scratch, syscalls=Syscalls(pwritev=held.syscalls.pwritev, punch=punching))
    held.release.set()
    step(store, 16)
    store.trim()
    while held._begun.acquire(blocking=False):
        pass
    held.release.clear()
    store._space._extents.allocate(128 * MIB)  # so that the write lies beyond what is kept
    running = store.write(buffer_of(BLOCK))
    held.await_begun()
    store.discard(running)
    store._space._extents.high_water = 0
    store._space._extents.free(0, 128 * MIB)
    store.trim()
    held.release.set()
    assert running.wait(WAIT_S)
    settle(store)
    where = 128 * MIB
    assert punching.seen
    assert all(offset + length <= where or offset >= where + 16 * MIB for offset, length in punching.seen)
    store.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_at_its_capacity_stays_below_it_and_uses_what_is_about_to_be_punched(
    scratch: Path, threads: int
) -> None:
    capacity = 100 * MIB + 5  # neither a multiple of the growth nor of a block
    punching = Punching()
    store = PosixStore(scratch, threads=threads, capacity_bytes=capacity, syscalls=Syscalls(punch=punching))
    for _ in range(3):
        step(store, 6)
        assert store.allocated_bytes() <= capacity + MIB
        with pytest.raises(StoreFull, match=rf"may have {capacity} bytes, {96 * MIB} of them in use"):
            fill(store)
        store.trim()
        write_one = write(store, pattern_at(0, 1))
        store.discard(write_one)
        store.trim()  # now all but the first 64 MiB is taken out, to be punched
        step(store, 6)
    assert store.used_bytes == 0
    store.close()


@pytest.mark.parametrize("begun", [False, True])
def test_a_full_file_waits_for_a_punch_or_does_without_rather_than_fail(scratch: Path, begun: bool) -> None:
    punching = Punching()
    store = PosixStore(scratch, threads=2, capacity_bytes=128 * MIB, syscalls=Syscalls(punch=punching))
    step(store, 8)
    store.trim()
    step(store, 1)
    kept = [store.write(buffer_of(BLOCK)) for _ in range(4)]
    for ticket in kept:
        assert ticket.wait(WAIT_S)
    store._space._extents.high_water = 1
    gate, waiting = threading.Event(), threading.Semaphore(0)

    def before() -> None:
        waiting.release()
        assert gate.wait(WAIT_S)

    held = [store.write(buffer_of(BLOCK), before=before) for _ in range(1 if begun else 2)]
    assert all(waiting.acquire(timeout=WAIT_S) for _ in held)
    punching.release.clear()
    store.trim()  # takes all that is free; where both workers are held, the punch itself is queued behind them
    assert store._space._punching
    if begun:
        assert punching.begun.wait(WAIT_S)
    gate.set()
    if begun:
        assert not held[0].wait(0.05)
        punching.release.set()
    else:
        assert not punching.seen
        punching.release.set()
    for ticket in held:
        assert ticket.wait(WAIT_S)
    for ticket in (*kept, *held):
        assert np.array_equal(read_back(store, ticket), BLOCK)
        store.discard(ticket)
    assert store.used_bytes == 0
    store.close()


def fill(store: PosixStore) -> None:
    """Write until one fails; raises that one's error when all are discarded."""
    tickets: list[Ticket] = []
    try:
        while True:
            tickets.append(store.write(buffer_of(BLOCK)))
            assert tickets[-1].wait(WAIT_S)
    finally:
        for ticket in tickets:
            store.discard(ticket)
