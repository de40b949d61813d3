"""TwoLevelStore: host memory first, the oldest write to the file when it is full, and reads from wherever bytes are."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from io_backends import Buffer, HostStore, PosixStore, Store, Ticket
from io_backends._stores.two_level import Place, Stored, TwoLevelStore, coldest
from io_backends.testing import Fault, FaultyStore, check_store
from support.stores import WAIT_S, buffer_of, empty_at, pattern_at
from support.two_level import BUDGET, KIB, Make, await_spill, given, maker, places, read, waits, write


@pytest.fixture
def make(scratch: Path) -> Iterator[Make]:
    with maker(scratch) as make:
        yield make


def test_the_coldest_is_the_oldest_in_host_memory() -> None:
    stored = [Stored(1) for _ in range(5)]
    for one, place in zip(stored, (Place.FILE, Place.SPILLING, Place.COMING, Place.HOST, Place.HOST), strict=True):
        one.place = place
    assert coldest(stored) is stored[3]
    assert coldest(stored[:3]) is None
    assert coldest([]) is None


def test_what_fits_stays_in_host_memory(make: Make) -> None:
    store = make()
    arrays = [pattern_at(64, 25 * KIB, seed) for seed in range(4)]
    tickets = [write(store, array) for array in arrays]
    assert places(*tickets) == ["HOST"] * 4
    assert store.host_bytes == BUDGET == store.allocated_bytes()
    for array, ticket in zip(arrays, tickets, strict=True):
        assert ticket.moved_bytes == ticket.nbytes == 25 * KIB
        assert np.array_equal(read(store, ticket), array)


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


def test_a_budget_of_nothing_is_a_file_store(make: Make) -> None:
    store = make(budget=0)
    arrays = [pattern_at(0, nbytes) for nbytes in (0, 1, 5000)]
    for array in arrays:
        assert np.array_equal(read(store, write(store, array)), array)
    assert store.host_bytes == 0


def test_a_discard_makes_room_without_the_file(make: Make) -> None:
    store = make()
    for _ in range(20):
        tickets = [write(store, pattern_at(0, 25 * KIB)) for _ in range(4)]
        for ticket in tickets:
            store.discard(ticket)
            store.discard(ticket)  # a second time changes nothing
            assert ticket.location is None
        assert store.host_bytes == 0
    assert store.allocated_bytes() == 0


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
    with pytest.raises(ValueError, match="asked to read 10 bytes into a buffer of 11"):
        store.read(ticket.location, buffer_of(empty_at(0, 11)))
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
