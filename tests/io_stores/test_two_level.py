"""TwoLevelStore: host memory first, the oldest write to the file when it is full, reads from wherever bytes are.

Then, when things go wrong: discards in every state, files that fail or stand still, closing, forks.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from io_backends import (
    Buffer,
    HostStore,
    PosixStore,
    Store,
    StoreBroken,
    StoreClosed,
    StoreFull,
    Syscalls,
    Ticket,
    TicketState,
    TransferCancelled,
)
from io_backends._stores.two_level import Place, TwoLevelStore
from io_backends.testing import Fault, FaultyStore, Operation, check_store
from support.stores import WAIT_S, Bytes, Plan, buffer_of, empty_at, in_child, once, pattern_at

KIB = 1024
BUDGET = 100 * KIB


class Make(Protocol):
    """Makes a store; `faults` are those of the file store."""

    def __call__(
        self,
        faults: dict[tuple[Operation, int], Fault] | None = None,
        *,
        budget: int = BUDGET,
        threads: int = 2,
        syscalls: Syscalls | None = None,
    ) -> TwoLevelStore: ...


@pytest.fixture
def make(scratch: Path) -> Iterator[Make]:
    """Makes stores that are closed in the end."""
    made: list[TwoLevelStore] = []

    def make(
        faults: dict[tuple[Operation, int], Fault] | None = None,
        *,
        budget: int = BUDGET,
        threads: int = 2,
        syscalls: Syscalls | None = None,
    ) -> TwoLevelStore:
        file = FaultyStore(PosixStore(scratch, threads=1, syscalls=syscalls), Plan(faults or {}))
        made.append(TwoLevelStore(HostStore(), file, budget, threads=threads))
        return made[-1]

    yield make
    for store in made:
        store.close()


def file_bytes_in_use(store: TwoLevelStore) -> int:
    """Bytes of the file that belong to writes."""
    assert isinstance(store._file, FaultyStore)
    assert isinstance(store._file._store, PosixStore)
    return store._file._store.used_bytes


def places(*tickets: Ticket) -> list[str]:
    return [ticket.location.place.name for ticket in tickets]


def given(array: Bytes) -> Buffer:
    """Memory that the store may keep."""
    return buffer_of(array)._replace(given=True)


def write(store: Store, array: Bytes) -> Ticket:
    """A finished write of memory that the store may keep. Raises its error."""
    ticket = store.write(given(array))
    assert ticket.wait(WAIT_S)
    return ticket


def read(store: Store, ticket: Ticket, *, padded: bool = True) -> Bytes:
    array = empty_at(ticket.location.skew if padded else 77, ticket.nbytes)
    assert store.read(ticket.location, buffer_of(array, padded=padded)).wait(WAIT_S)
    return array


def await_spill(store: TwoLevelStore, ticket: Ticket) -> None:
    """Until `ticket`'s bytes are on their way to the file."""
    deadline = threading.Event()
    for _ in range(6000):
        if ticket.location.place is Place.SPILLING and ticket.location.file is not None:
            return
        deadline.wait(0.01)
    raise AssertionError(f"{ticket.location.place} after a minute")


def waits(gate: threading.Event) -> None:
    assert gate.wait(WAIT_S)


def test_what_was_written_first_makes_way_first(make: Make) -> None:
    store = make(threads=1)
    arrays = [pattern_at(64 * seed, 25 * KIB, seed) for seed in range(7)]
    tickets = [write(store, array) for array in arrays]
    assert places(*tickets) == ["FILE"] * 3 + ["HOST"] * 4
    assert store.host_bytes == BUDGET
    for padded in (True, False):
        for array, ticket in reversed(list(zip(arrays, tickets, strict=True))):
            assert np.array_equal(read(store, ticket, padded=padded), array)


def test_given_memory_is_kept_and_used_in_place(make: Make) -> None:
    store = make(budget=1000)
    array = pattern_at(16, 600)
    ticket = store.write(given(array))
    assert ticket.wait(WAIT_S)
    there = store.resident(ticket.location)
    assert there is not None
    assert (there.address, there.owner) == (array.ctypes.data, array)
    watched = weakref.ref(array)
    kept = array.copy()
    del array, there
    assert watched() is not None
    other = write(store, pattern_at(0, 600, 1))  # it must leave
    assert watched() is None
    assert store.resident(ticket.location) is None
    assert store.resident(other.location) is not None
    assert np.array_equal(read(store, ticket), kept)


def test_what_is_larger_than_the_budget_goes_to_the_file_at_once(make: Make) -> None:
    store = make()
    small = write(store, pattern_at(0, 10))
    array = pattern_at(99, BUDGET + 1)
    ticket = write(store, array)
    assert places(small, ticket) == ["HOST", "FILE"]
    assert store.host_bytes == 10
    assert np.array_equal(read(store, ticket), array)
    store.discard(ticket)
    assert ticket.location is None


def test_the_file_is_reused(make: Make) -> None:
    store = make(budget=30 * KIB)
    sizes = []
    for _ in range(10):
        tickets = [write(store, pattern_at(0, 25 * KIB)) for _ in range(4)]
        sizes.append(store.allocated_bytes() - store.host_bytes)
        for ticket in tickets:
            store.discard(ticket)
        store.trim()
    assert sizes[1:] == [sizes[-1]] * 9
    assert sizes[-1] <= sizes[0]  # it is laid out for more than so small a step needs


def test_a_read_during_the_spill_comes_from_host_memory(make: Make) -> None:
    gate = threading.Event()
    store = make({("write", 0): Fault(gate=gate)})
    array = pattern_at(5, 60 * KIB)
    first = write(store, array)
    second = store.write(given(pattern_at(0, 60 * KIB, 1)))
    await_spill(store, first)
    assert np.array_equal(read(store, first), array)
    assert not second.done()
    gate.set()
    assert second.wait(WAIT_S)
    assert places(first, second) == ["FILE", "HOST"]
    assert np.array_equal(read(store, first), array)


def test_a_read_outlives_the_spill_and_the_discard(make: Make) -> None:
    store = make()
    array = pattern_at(5, 60 * KIB)
    first = write(store, array)
    gate, target = threading.Event(), empty_at(0, 60 * KIB)
    ticket = store.read(first.location, buffer_of(target), before=lambda: waits(gate))
    other = pattern_at(0, 60 * KIB, 1)
    # The host store has one worker, and the read has it: the bytes leave for the file meanwhile, and are discarded.
    second = store.write(given(other))
    while first.location.place is not Place.FILE:
        assert not gate.wait(0.01)
    store.discard(first)
    gate.set()
    assert ticket.wait(WAIT_S)
    assert second.wait(WAIT_S)
    assert np.array_equal(target, array)
    assert np.array_equal(read(store, second), other)


def test_what_makes_no_sense_is_refused(make: Make) -> None:
    store = make()
    ticket = write(store, pattern_at(0, 10))
    store.discard(ticket)
    with pytest.raises(ValueError, match="nothing to read there"):
        store.read(ticket.location, buffer_of(empty_at(0, 10)))
    with pytest.raises(ValueError, match="cannot be negative, got -1"):
        TwoLevelStore(HostStore(), HostStore(), -1)


def test_only_what_is_given_stays_in_host_memory(scratch: Path) -> None:
    with closing(TwoLevelStore(HostStore(), PosixStore(scratch), BUDGET)) as store:
        array = pattern_at(64, 25 * KIB)
        expected = array.copy()
        ours, theirs = store.write(given(array)), store.write(buffer_of(array))
        assert ours.wait(WAIT_S)
        assert theirs.wait(WAIT_S)
        assert places(ours, theirs) == ["HOST", "FILE"]
        array.fill(0)  # they may do so
        assert np.array_equal(read(store, theirs), expected)


class Giving(FaultyStore):
    """Its writes are of memory that the store may keep."""

    def submit_write(self, buffer: Buffer, *callbacks: Any) -> Ticket:
        return super().submit_write(buffer._replace(given=True), *callbacks)


@pytest.mark.parametrize("budget", [1 << 28, 1 << 20, 0], ids=["in host memory", "in both", "in the file"])
@pytest.mark.parametrize("giving", [False, True])
def test_the_contract_of_a_store_is_kept(scratch: Path, budget: int, giving: bool) -> None:
    def make() -> Store:
        store = TwoLevelStore(HostStore(), PosixStore(scratch), budget)
        return Giving(store, lambda *_: None) if giving else store

    check_store(make, keeps_memory=giving and budget > 0)


# -- when things go wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("running", [False, True])
def test_a_discard_during_the_spill(make: Make, running: bool) -> None:
    """Cancelled where the file store has not begun it, else ended first; either way all of it is given back."""
    gate = threading.Event()
    store = make({("write", 0): Fault(gate=gate)}, threads=2)
    big = write(store, pattern_at(0, 60 * KIB, 1))
    small = write(store, pattern_at(0, 30 * KIB, 2))
    third = store.write(given(pattern_at(0, 35 * KIB, 3)))  # `big` leaves for it
    await_spill(store, big)
    fourth = store.write(given(pattern_at(0, 70 * KIB, 4)))  # and `small`, behind `big` in the file's queue
    await_spill(store, small)
    mine = big if running else small
    spill = mine.location.file
    store.discard(mine)
    assert (spill.state is TicketState.CANCELLED) is not running
    gate.set()
    assert third.wait(WAIT_S)
    assert fourth.wait(WAIT_S)
    for ticket in (big, small, third, fourth):
        store.discard(ticket)
    assert store.host_bytes == 0
    assert file_bytes_in_use(store) == 0


def test_discarding_a_write_that_waits_for_room(make: Make) -> None:
    gate = threading.Event()
    store = make({("write", 0): Fault(gate=gate)})
    first = write(store, pattern_at(0, 90 * KIB))
    spilling = store.write(given(pattern_at(0, 90 * KIB)))
    await_spill(store, first)
    array = pattern_at(0, 20 * KIB)
    watched = weakref.ref(array)
    ended = threading.Event()
    waiting = store.write(given(array), on_done=lambda _: ended.set())  # nothing is left to make way for it
    del array
    while waiting.state is TicketState.QUEUED:
        assert not gate.wait(0.001)
    store.discard(waiting)
    assert ended.wait(WAIT_S)
    with pytest.raises(TransferCancelled, match="discarded before it was stored"):
        waiting.wait(WAIT_S)
    assert watched() is None
    gate.set()
    assert spilling.wait(WAIT_S)
    assert places(first, spilling) == ["FILE", "HOST"]


def test_memory_never_grows_behind_a_file_that_stands_still(make: Make) -> None:
    gate = threading.Event()
    store = make({("write", number): Fault(gate=gate) for number in range(100)})
    arrays = [pattern_at(0, 25 * KIB, seed) for seed in range(12)]
    tickets = [store.write(given(array)) for array in arrays]
    await_spill(store, tickets[0])
    for ticket in tickets[:4]:
        assert ticket.wait(WAIT_S)
    assert not any(ticket.done() for ticket in tickets[6:])
    assert store.host_bytes <= BUDGET
    gate.set()
    for array, ticket in zip(arrays, tickets, strict=True):
        assert ticket.wait(WAIT_S)
        assert store.host_bytes <= BUDGET
        assert np.array_equal(read(store, ticket), array)


def test_a_file_that_fails_leaves_the_bytes_in_host_memory(make: Make) -> None:
    store = make({("write", 0): Fault(error=OSError(errno.EIO, "injected"))})
    array = pattern_at(0, 60 * KIB)
    first = write(store, array)
    second = store.write(given(pattern_at(0, 60 * KIB, 1)))
    expected = f"holds {60 * KIB} of {BUDGET} bytes.*did not take the oldest {60 * KIB} of them.*injected"
    with pytest.raises(StoreFull, match=expected) as caught:
        second.wait(WAIT_S)
    assert isinstance(caught.value.__cause__, StoreBroken)
    assert store.host_bytes == 60 * KIB
    assert places(first, second) == ["HOST", "GONE"]
    assert np.array_equal(read(store, first), array)
    store.discard(second)
    third = write(store, pattern_at(0, 60 * KIB, 2))  # by now the file works again
    assert places(first, third) == ["FILE", "HOST"]
    assert np.array_equal(read(store, first), array)
    assert file_bytes_in_use(store) == 60 * KIB  # nothing of the failed one


def test_a_file_that_is_full_leaves_small_writes_their_room(make: Make) -> None:
    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = make(syscalls=Syscalls(fallocate=fallocate))
    first = write(store, pattern_at(0, 60 * KIB))
    with pytest.raises(StoreFull, match="No space left"):
        write(store, pattern_at(0, 60 * KIB))
    with pytest.raises(StoreFull, match="no space left"):
        write(store, pattern_at(0, BUDGET + 1))
    second = write(store, pattern_at(0, 40 * KIB))
    assert places(first, second) == ["HOST", "HOST"]
    store.discard(first)
    assert places(second, write(store, pattern_at(0, 60 * KIB))) == ["HOST", "HOST"]


def test_an_error_before_the_write_is_carried_and_leaves_nothing(make: Make) -> None:
    def before() -> None:
        raise RuntimeError("the device is gone")

    store = make()
    ticket = store.write(given(pattern_at(0, 100)), before=before)
    with pytest.raises(StoreBroken, match="the device is gone"):
        ticket.wait(WAIT_S)
    with pytest.raises(ValueError, match="nothing to read there"):
        store.read(ticket.location, given(empty_at(0, 100)))
    store.discard(ticket)
    assert store.host_bytes == 0
    assert store._upper == {}


def test_close_with_writes_waiting_for_room(make: Make) -> None:
    gate = threading.Event()
    store = make({("write", 0): Fault(gate=gate)})
    first = write(store, pattern_at(0, 90 * KIB))
    waiting = [store.write(given(pattern_at(0, 90 * KIB))) for _ in range(4)]
    await_spill(store, first)
    opener = once(lambda: store._workers._stopping, gate.set)
    store.close()
    store.close()
    opener.join()
    for ticket in waiting[1:]:
        with pytest.raises(StoreClosed):
            ticket.wait(WAIT_S)
    with pytest.raises(StoreClosed):
        store.write(given(pattern_at(0, 10)))
    with pytest.raises(StoreClosed):
        store.read(first.location, given(empty_at(0, 90 * KIB)))
    for ticket in (first, *waiting):
        store.discard(ticket)
    assert store.host_bytes == 0


def test_abandon_ends_the_threads_of_all_three(make: Make) -> None:
    store = make()
    write(store, pattern_at(0, 90 * KIB))
    read(store, write(store, pattern_at(0, 90 * KIB)))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("tba-")]
    assert {thread.name.rsplit("-", 2)[0] for thread in threads} >= {"tba-two-level", "tba-io", "tba-host"}
    store.abandon()
    store.abandon()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_a_spill_is_under_way(make: Make) -> None:
    """The file's transfers rest; this store's workers wait for them, so they must not be waited for as well."""
    gate = threading.Event()
    store = make({("write", 0): Fault(gate=gate)})
    array = pattern_at(0, 90 * KIB)
    first = write(store, array)
    second = store.write(given(pattern_at(0, 90 * KIB, 1)))
    await_spill(store, first)
    threading.Timer(0.2, gate.set).start()

    def child() -> str:
        try:
            store.write(given(pattern_at(0, 10)))
        except StoreClosed:
            return "closed"
        return "open"

    assert in_child(child) == "closed"
    assert second.wait(WAIT_S)
    assert np.array_equal(read(store, first), array)


def test_many_threads_over_a_file_that_fails_now_and_then(make: Make) -> None:
    """Every write either fails with StoreFull or comes back byte for byte, from wherever; in the end all is free."""
    faults: dict[tuple[Operation, int], Fault] = {
        ("write", number): Fault(delay_s=0.001, error=OSError(errno.EIO, "injected") if number % 7 == 3 else None)
        for number in range(2000)
    }
    store = make(faults)
    wrong: list[str] = []
    refused: list[StoreFull] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        held: list[tuple[Bytes, Ticket]] = []
        for step in range(60):
            array = pattern_at(choose.randrange(4096), choose.choice([1, 5000, 20 * KIB, 45 * KIB]), 100 * seed + step)
            ticket = store.write(given(array))
            if choose.random() < 0.1:
                store.discard(ticket)
                continue
            try:
                ticket.wait(WAIT_S)
                held.append((array, ticket))
            except StoreFull as error:
                refused.append(error)
                store.discard(ticket)
            while held and (len(held) > 5 or choose.random() < 0.3):
                array, ticket = held.pop(choose.randrange(len(held)))
                if not np.array_equal(read(store, ticket, padded=choose.random() < 0.5), array):
                    wrong.append(f"thread {seed}, step {step}: {ticket.location.place}")
                store.discard(ticket)
        for _, ticket in held:
            store.discard(ticket)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert refused
    store.close()  # running discards end with it
    assert store.host_bytes == 0
    assert store._upper == {}
