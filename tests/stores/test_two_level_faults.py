"""TwoLevelStore when things go wrong: discards in every state, files that fail or stand still, closing, forks."""

from __future__ import annotations

import errno
import os
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from io_backends import (
    HostStore,
    PosixStore,
    StoreBroken,
    StoreClosed,
    StoreFull,
    Syscalls,
    Ticket,
    TicketState,
    TransferCancelled,
)
from io_backends._stores.two_level import TwoLevelStore
from io_backends.testing import Fault, Operation
from support.stores import WAIT_S, Bytes, empty_at, in_child, once, pattern_at
from support.two_level import (
    BUDGET,
    KIB,
    Make,
    await_spill,
    file_bytes_in_use,
    given,
    maker,
    places,
    read,
    write,
)


@pytest.fixture
def make(scratch: Path) -> Iterator[Make]:
    with maker(scratch) as make:
        yield make


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


def test_without_a_file_host_memory_still_serves(tmp_path: Path) -> None:
    store = TwoLevelStore(HostStore(), PosixStore(tmp_path / "missing"), BUDGET)
    array = pattern_at(0, 60 * KIB)
    ticket = write(store, array)
    assert np.array_equal(read(store, ticket), array)
    with pytest.raises(StoreFull, match="cannot make a scratch file"):
        write(store, array)
    store.close()


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
