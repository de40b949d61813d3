"""Space: a file grows with what is stored, shrinks when a step needs less; no hole is ever punched under a write."""

from __future__ import annotations

import errno
import heapq
import math
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from io_backends import Buffer, Location, PosixStore, StoreFull, Syscalls, Ticket, _extents
from io_backends._extents import align_up
from io_backends._file import space as space_module
from io_backends._file.space import EXTENT_ALIGNMENT, Space
from support.interrupts import interrupted_everywhere
from support.stores import WAIT_S, Bytes, Failing, buffer_of, pattern_at, read_back, write

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


def test_the_file_shrinks_little_by_little_after_a_big_step(store: PosixStore, punching: Punching) -> None:
    step(store, 16)
    big = store.allocated_bytes()
    assert 256 * MIB <= big <= 256 * MIB * 5 // 4
    store.trim()
    settle(store)
    assert store.allocated_bytes() == big, "the last step was the big one"
    sizes = [big]
    for _ in range(30):
        step(store, 3)
        store.trim()
        settle(store)
        sizes.append(store.allocated_bytes())
    assert sizes == sorted(sizes, reverse=True)
    assert 48 * MIB <= sizes[-1] <= 48 * MIB * 5 // 4
    punched = len(punching.seen)
    step(store, 3)
    store.trim()
    settle(store)
    assert len(punching.seen) == punched, "the file is as it should be"
    step(store, 16)
    assert 256 * MIB <= store.allocated_bytes() <= 256 * MIB * 5 // 4
    assert store.used_bytes == 0


def test_steps_of_about_one_size_punch_nothing(store: PosixStore, punching: Punching) -> None:
    for count in (9, 10, 9, 11, 10, 9):
        step(store, count)
        store.trim()
    settle(store)
    assert punching.seen == []


def test_a_step_that_stores_nothing_leaves_the_file_its_blocks(store: PosixStore, punching: Punching) -> None:
    step(store, 3)
    store.trim()
    store.trim()  # its writes may be late, or all have gone to another of several stores
    settle(store)
    assert punching.seen == []
    assert store.allocated_bytes() >= 48 * MIB


def test_what_is_still_stored_survives_wherever_it_lies(store: PosixStore, punching: Punching) -> None:
    tickets = [store.write(buffer_of(BLOCK)) for _ in range(20)]
    for ticket in tickets:
        assert ticket.wait(WAIT_S)
    kept = [ticket for ticket in tickets if ticket.location.offset // (16 * MIB) in (7, 13, 19)]
    assert len(kept) == 3
    for ticket in tickets:
        if ticket not in kept:
            store.discard(ticket)
    for _ in range(30):
        step(store, 1)
        store.trim()
        settle(store)
    assert punching.seen
    assert store.allocated_bytes() <= 4 * 16 * MIB * 5 // 4, "there are holes below what is kept"
    for ticket in kept:
        assert np.array_equal(read_back(store, ticket), BLOCK)
    step(store, 20)  # into the holes and beyond
    for ticket in kept:
        assert np.array_equal(read_back(store, ticket), BLOCK)
        store.discard(ticket)
    assert store.used_bytes == 0


class Blocks:
    """The blocks of a file, as the system calls of a store leave them."""

    def __init__(self, capacity_bytes: int) -> None:
        self.there = np.zeros(capacity_bytes // EXTENT_ALIGNMENT, bool)
        self.syscalls = Syscalls(fallocate=self.lay_out, punch=self.punch, allocated=lambda fd: self.nbytes)

    def lay_out(self, fd: int, offset: int, length: int) -> None:
        self.there[offset // EXTENT_ALIGNMENT : (offset + length) // EXTENT_ALIGNMENT] = True

    def punch(self, fd: int, offset: int, length: int) -> None:
        self.there[offset // EXTENT_ALIGNMENT : (offset + length) // EXTENT_ALIGNMENT] = False

    @property
    def nbytes(self) -> int:
        return int(self.there.sum()) * EXTENT_ALIGNMENT


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("count", "most_mib", "life"), [(6, 16, 2.0), (3, 32, 4.0), (12, 4, 1.2)])
def test_the_file_stays_within_a_quarter_of_what_was_live_under_random_lifetimes(
    count: int, most_mib: int, life: float, seed: int
) -> None:
    """2,000 steps of `count` writes of 1 MiB and more, each discarded within `life` steps."""
    choose = random.Random(seed)
    blocks = Blocks(1 << 30)
    space = Space("", blocks.syscalls)
    live: list[tuple[float, int, int]] = []
    used = most_used = 0
    for step_number in range(2000):
        for write_number in range(count):
            now = step_number + write_number / count
            while live and live[0][0] <= now:
                _, offset, length = heapq.heappop(live)
                space.give_back(offset, length)
                used -= length
            length = align_up(int(MIB * math.exp(choose.uniform(0, math.log(most_mib)))), EXTENT_ALIGNMENT)
            offset = space.take(length)
            space.reserve(3, offset + length)
            blocks.lay_out(3, offset, length)
            heapq.heappush(live, (now + choose.random() * life, offset, length))
            used += length
            most_used = max(most_used, used)
        if space.begin_trim(blocks.nbytes):
            space.punch(3)
        assert used <= blocks.nbytes <= most_used * 5 // 4 + 2 * MIB, f"step {step_number}"
    assert most_used > 30 * MIB


@pytest.mark.parametrize("operation", ["discard", "used_bytes", "begin_trim"])
def test_what_the_main_thread_does_may_be_interrupted_anywhere(operation: str) -> None:
    """The next write gets the range that was discarded, and no other loses its own."""

    def set_up() -> tuple[Space, list[Ticket]]:
        space = Space("", Blocks(1 << 20).syscalls)
        tickets = [
            Ticket(Buffer(0, 4096, None), Location(space.take(4096), 4096, 4096, 0), lambda _: None) for _ in range(3)
        ]
        for ticket in tickets:
            ticket.start()
            ticket.run(time.perf_counter)
        space._lock = threading.RLock()  # type: ignore[assignment]  # no interrupt comes between a block and its lock
        space.discard(tickets[1])
        return space, tickets

    def operate(begun: tuple[Space, list[Ticket]]) -> None:
        space, tickets = begun
        if operation == "discard":
            space.discard(tickets[1])
        elif operation == "used_bytes":
            assert space.used_bytes == 8192
        else:
            space.begin_trim(1 << 20)

    for place, (space, tickets) in interrupted_everywhere(set_up, operate, space_module, _extents):
        space.discard(tickets[1])  # any number of times
        assert space.used_bytes == 8192, f"interrupted at bytecode {place}"
        assert [space.take(4096) for _ in range(2)] == [4096, 12288]
        space.discard(tickets[0])
        assert space.take(4096) == 0


def test_a_write_during_a_punch_goes_elsewhere(store: PosixStore, punching: Punching) -> None:
    step(store, 16)
    shrink(store)
    punching.release.clear()
    store.trim()
    assert punching.begun.wait(WAIT_S)
    ((offset, length),) = punching.seen
    assert store.used_bytes == 0
    count = offset // (16 * MIB)
    below = [store.write(buffer_of(BLOCK)) for _ in range(count)]
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
    for count in (16, *[1] * 10, 16, *[1] * 10):
        step(store, count)
        store.trim()
        settle(store)
    assert failing.calls == 2
    assert store.used_bytes == 0
    step(store, 16)
    assert failing.calls == 2
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


@pytest.mark.parametrize("threads", [1, 2])
def test_a_full_file_reuses_ranges_waiting_for_punch(scratch: Path, threads: int) -> None:
    capacity = 100 * MIB + 5  # neither a multiple of the growth nor of a block
    punching = Punching()
    store = PosixStore(scratch, threads=threads, capacity_bytes=capacity, syscalls=Syscalls(punch=punching))
    for _ in range(3):
        step(store, 6)
        assert store.allocated_bytes() <= capacity + MIB
        with pytest.raises(StoreFull, match=rf"limited to {capacity} bytes, {96 * MIB} of them in use"):
            fill(store)
        store.trim()
        write_one = write(store, pattern_at(0, 1))
        store.discard(write_one)
        store.trim()  # now all but the first 64 MiB is taken out, to be punched
        step(store, 6)
    assert store.used_bytes == 0
    store.close()


def test_a_full_file_waits_for_a_punch_rather_than_fail(scratch: Path) -> None:
    punching = Punching()
    store = PosixStore(scratch, threads=2, capacity_bytes=128 * MIB, syscalls=Syscalls(punch=punching))
    step(store, 8)
    shrink(store)
    punching.release.clear()
    store.trim()
    assert punching.begun.wait(WAIT_S)
    tickets = [store.write(buffer_of(BLOCK)) for _ in range(8)]  # all of it, while some is taken out
    for ticket in tickets[:6]:
        assert ticket.wait(WAIT_S)
    assert not tickets[-1].wait(0.05)
    punching.release.set()
    for ticket in tickets:
        assert ticket.wait(WAIT_S)
        assert np.array_equal(read_back(store, ticket), BLOCK)
        store.discard(ticket)
    assert store.used_bytes == 0
    store.close()


def shrink(store: PosixStore) -> None:
    """Have the store forget the steps before: at the next trim it finds that the file has too many blocks."""
    store._space._need = store._space._step_bytes = 0


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
