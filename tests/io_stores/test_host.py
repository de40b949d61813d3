"""HostStore: what is written stays where it is, within a budget; what is read is copied."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from io_backends import HostStore, StoreFull
from support.stores import WAIT_S, buffer_of, empty_at, pattern_at, read_back, write


@pytest.fixture
def store() -> Iterator[HostStore]:
    store = HostStore()
    yield store
    store.close()


def test_a_write_keeps_the_memory_it_was_given(store: HostStore) -> None:
    array = pattern_at(3, 10_000)
    buffer = buffer_of(array)
    ticket = store.write(buffer)
    assert ticket.wait(WAIT_S)
    assert ticket.location is buffer
    assert ticket.moved_bytes == 10_000
    watched = weakref.ref(array)
    del array, buffer
    assert watched() is not None
    store.discard(ticket)
    assert watched() is None


def test_the_sum_of_what_is_stored(store: HostStore) -> None:
    tickets = [write(store, pattern_at(0, nbytes)) for nbytes in (100, 20, 3)]
    assert store.allocated_bytes() == 123
    for _ in range(2):  # a second time changes nothing
        store.discard(tickets[1])
        assert store.allocated_bytes() == 103
    assert tickets[1].location is None
    read_back(store, tickets[0])
    assert store.allocated_bytes() == 103


# -- a budget ----------------------------------------------------------------------------------------------------------


def test_a_write_beyond_the_budget_fails_and_keeps_nothing() -> None:
    store = HostStore(budget_bytes=1000)
    first = write(store, pattern_at(0, 900))
    array = pattern_at(0, 101)
    watched = weakref.ref(array)
    refused = store.write(buffer_of(array))
    with pytest.raises(StoreFull, match=r"a write of 101 bytes .* budget is 1000 bytes, 900 of them in use"):
        refused.wait(WAIT_S)
    del array
    assert watched() is None
    assert refused.location is None
    assert store.allocated_bytes() == 900
    fits = write(store, pattern_at(0, 100))
    store.discard(refused)  # held nothing, so gives nothing back
    assert store.allocated_bytes() == 1000
    store.discard(first)
    assert store.allocated_bytes() == 100
    write(store, pattern_at(0, 900))
    store.discard(fits)
    store.close()


def test_what_did_not_end_well_cannot_be_read(store: HostStore) -> None:
    with pytest.raises(ValueError, match="nothing to read there"):
        store.read(None, buffer_of(empty_at(0, 10)))


def test_a_finaliser_may_discard_while_its_thread_is_in_the_store(store: HostStore) -> None:
    ticket = write(store, pattern_at(0, 10))
    with store._lock:  # as if the collector ran in the middle of `write`
        store.discard(ticket)
        store.discard(ticket)
    assert store.allocated_bytes() == 0


def test_a_reader_outlives_the_discard(store: HostStore) -> None:
    """Its bytes stay until it has ended, though the write they came from is gone."""
    array = pattern_at(0, 40_000)
    expected, watched = array.copy(), weakref.ref(array)
    ticket = write(store, array)
    del array
    gate, target = threading.Event(), empty_at(0, 40_000)

    def before() -> None:
        assert gate.wait(WAIT_S)

    reader = store.read(ticket.location, buffer_of(target), before=before)
    store.discard(ticket)
    assert watched() is not None
    gate.set()
    assert reader.wait(WAIT_S)
    assert np.array_equal(target, expected)
