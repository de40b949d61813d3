"""HostStore: what is written stays where it is, within a budget; what is read is copied."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from io_backends import HostStore, Store, StoreBroken, StoreClosed, StoreFull, Ticket, TicketState
from support.stores import WAIT_S, buffer_of, empty_at, pattern_at, read_back, write


@pytest.fixture
def store() -> Iterator[HostStore]:
    store = HostStore()
    yield store
    store.close()


def test_it_is_a_store(store: HostStore) -> None:
    as_protocol: Store = store
    assert as_protocol.alignment == 1


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


@pytest.mark.parametrize("nbytes", [0, 1, 511, 100_001])
def test_a_read_copies(store: HostStore, nbytes: int) -> None:
    array = pattern_at(3, nbytes)
    ticket = write(store, array)
    copy = read_back(store, ticket)
    assert copy.ctypes.data != array.ctypes.data
    assert np.array_equal(copy, array)


def test_a_read_ends_with_the_bytes_it_moved_and_lets_go_of_its_buffer(store: HostStore) -> None:
    ticket = write(store, pattern_at(3, 5000))
    target = empty_at(0, 5000)
    watched = weakref.ref(target)
    done: list[int] = []
    read = store.read(ticket.location, buffer_of(target), on_done=lambda t: done.append(t.moved_bytes))
    assert read.wait(WAIT_S)
    assert done == [read.moved_bytes] == [5000]
    del target
    assert watched() is None


def test_a_buffer_of_another_size_is_refused(store: HostStore) -> None:
    ticket = write(store, pattern_at(0, 10))
    with pytest.raises(ValueError, match="asked to read 10 bytes into a buffer of 11"):
        store.read(ticket.location, buffer_of(empty_at(0, 11)))


def test_before_runs_on_the_worker_ahead_of_the_end(store: HostStore) -> None:
    """It waits for the device's copy: only then may the source go."""
    order: list[str] = []
    arrived = threading.Event()

    def before() -> None:
        assert arrived.wait(WAIT_S)
        order.append(threading.current_thread().name)

    ticket = store.write(buffer_of(pattern_at(0, 8)), before=before, on_done=lambda _: order.append("done"))
    assert not ticket.done()
    arrived.set()
    assert ticket.wait(WAIT_S)
    assert order[0].startswith("tba-host")
    assert order[1:] == ["done"]


def test_a_before_that_fails_breaks_the_write(store: HostStore) -> None:
    def before() -> None:
        raise RuntimeError("the device is gone")

    ticket = store.write(buffer_of(pattern_at(0, 8)), before=before)
    with pytest.raises(StoreBroken, match="the device is gone"):
        ticket.wait(WAIT_S)
    assert store.allocated_bytes() == 8
    store.discard(ticket)
    assert store.allocated_bytes() == 0


def test_the_sum_of_what_is_stored(store: HostStore) -> None:
    tickets = [write(store, pattern_at(0, nbytes)) for nbytes in (100, 20, 3)]
    assert store.allocated_bytes() == 123
    for _ in range(2):  # a second time changes nothing
        store.discard(tickets[1])
        assert store.allocated_bytes() == 103
    assert tickets[1].location is None
    read_back(store, tickets[0])
    assert store.allocated_bytes() == 103


def test_discarding_a_queued_write_takes_it_back(store: HostStore) -> None:
    begun, release = threading.Event(), threading.Event()

    def before() -> None:
        begun.set()
        assert release.wait(WAIT_S)

    running = store.write(buffer_of(pattern_at(0, 8)), before=before)
    assert begun.wait(WAIT_S)
    called: list[Ticket] = []
    array = pattern_at(0, 50)
    watched = weakref.ref(array)
    queued = store.write(buffer_of(array), on_done=called.append)
    del array
    store.discard(queued)
    assert (queued.state, watched()) == (TicketState.CANCELLED, None)
    store.discard(running)  # may be discarded too: nobody writes to a location here
    release.set()
    assert running.wait(WAIT_S)
    assert store.allocated_bytes() == 0
    assert called == []


def test_after_close_it_refuses(store: HostStore) -> None:
    array = pattern_at(0, 100)
    ticket = write(store, array)
    store.close()
    store.close()
    store.abandon()
    with pytest.raises(StoreClosed):
        store.write(buffer_of(array))
    with pytest.raises(StoreClosed):
        store.read(ticket.location, buffer_of(empty_at(0, 100)))
    store.discard(ticket)
    assert store.allocated_bytes() == 0


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
    with pytest.raises(ValueError, match="what is not there"):
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
