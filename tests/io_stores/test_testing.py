"""FaultyStore: late, failing and corrupted transfers, each on demand and none else."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from io_backends import HostStore, PosixStore, Store, StoreBroken, StoreFull, Ticket, TicketState
from io_backends._testing import faulty
from io_backends.testing import Fault, FaultyStore
from support.stores import WAIT_S, Bytes, Plan, buffer_of, empty_at, pattern_at, read_back, write

NBYTES = 5000
MakeStore = Callable[[Plan], FaultyStore]


@pytest.fixture(params=["posix", "host"])
def make(request: pytest.FixtureRequest, scratch: Path) -> Iterator[MakeStore]:
    stores: list[FaultyStore] = []

    def make_store(plan: Plan) -> FaultyStore:
        inner: Store = PosixStore(scratch, threads=1) if request.param == "posix" else HostStore()
        stores.append(FaultyStore(inner, plan))
        return stores[-1]

    yield make_store
    for store in stores:
        store.close()


def copy_of(store: Store, ticket: Ticket, **callbacks: Callable[..., None]) -> tuple[Ticket, Bytes]:
    """A read that is not waited for."""
    skew = ticket.location.skew if isinstance(store, PosixStore) else 0
    array = empty_at(skew, ticket.nbytes)
    return store.read(ticket.location, buffer_of(array), **callbacks), array


def test_without_faults_it_is_the_store_beneath(make: MakeStore) -> None:
    plan = Plan({})
    store = make(plan)
    arrays = [pattern_at(64, NBYTES, seed) for seed in range(3)]
    done: list[str] = []
    tickets = [
        store.write(buffer_of(array), before=lambda: done.append("before"), on_done=lambda _: done.append("done"))
        for array in arrays
    ]
    for ticket, array in zip(tickets, arrays, strict=True):
        assert ticket.wait(WAIT_S)
        assert np.array_equal(read_back(store, ticket), array)
    assert done == ["before", "done"] * 3
    assert plan.asked == [("write", 0), ("write", 1), ("write", 2), ("read", 0), ("read", 1), ("read", 2)]
    assert store.allocated_bytes() >= 3 * NBYTES
    assert store.alignment in (1, 512, 4096)
    for ticket in tickets:
        store.discard(ticket)
    beneath = store._store
    assert (beneath.used_bytes if isinstance(beneath, PosixStore) else beneath.allocated_bytes()) == 0


def test_a_gate_holds_a_transfer_until_it_is_opened(make: MakeStore) -> None:
    gate, begun = Event(), Event()
    store = make(Plan({("write", 0): Fault(gate=gate), ("read", 1): Fault(gate=gate)}))
    array = pattern_at(64, NBYTES)
    ticket = store.write(buffer_of(array), before=begun.set)
    assert begun.wait(WAIT_S)  # the worker is at the gate: the caller's own `before` comes first
    assert not ticket.wait(0.02)
    assert ticket.state is TicketState.RUNNING
    assert ticket.moved_bytes == 0
    gate.set()
    assert ticket.wait(WAIT_S)
    assert np.array_equal(read_back(store, ticket), array)

    gate.clear()
    begun.clear()
    read, copy = copy_of(store, ticket, before=begun.set)
    assert begun.wait(WAIT_S)
    assert not read.wait(0.02)
    assert not copy.any()
    gate.set()
    assert read.wait(WAIT_S)
    assert np.array_equal(copy, array)


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), StoreFull("told to be full")])
def test_an_error_takes_the_place_of_the_transfer(make: MakeStore, error: Exception) -> None:
    store = make(Plan({("write", 1): Fault(error=error), ("read", 0): Fault(error=error)}))
    kind = StoreFull if isinstance(error, StoreFull) else StoreBroken
    array = pattern_at(64, NBYTES)
    done: list[BaseException | None] = []
    good = write(store, array)
    bad = store.write(buffer_of(array), on_done=lambda t: done.append(t.error))
    with pytest.raises(kind, match=r"told to be full|Input/output error"):
        bad.wait(WAIT_S)
    read, copy = copy_of(store, good, on_done=lambda t: done.append(t.error))
    with pytest.raises(kind):
        read.wait(WAIT_S)
    assert not copy.any()
    assert bad.moved_bytes == read.moved_bytes == 0
    assert done == [bad.error, read.error]
    assert np.array_equal(read_back(store, good), array)


def test_a_delay_sleeps_on_the_worker(make: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[tuple[float, TicketState]] = []
    store = make(Plan({("write", 0): Fault(delay_s=12.5)}))

    class Time:
        @staticmethod
        def sleep(seconds: float) -> None:
            slept.append((seconds, holder[0].state))

    gate = Event()

    def before() -> None:
        assert gate.wait(WAIT_S)

    monkeypatch.setattr(faulty, "time", Time)
    holder: list[Ticket] = []
    ticket = store.write(buffer_of(pattern_at(64, NBYTES)), before=before)
    holder.append(ticket)
    gate.set()
    assert ticket.wait(WAIT_S)
    assert slept == [(12.5, TicketState.RUNNING)]


@pytest.mark.parametrize(("index", "place"), [(0, 0), (77, 77), (NBYTES - 1, NBYTES - 1), (NBYTES + 3, 3), (-1, -1)])
def test_a_byte_is_inverted_after_a_read(make: MakeStore, index: int, place: int) -> None:
    store = make(Plan({("read", 1): Fault(flip_byte=index)}))
    array = pattern_at(64, NBYTES)
    ticket = write(store, array)
    assert np.array_equal(read_back(store, ticket), array)
    seen: list[bool] = []
    # By the buffer: the read may have ended before `copy` has its name.
    read, copy = copy_of(
        store, ticket, on_done=lambda t: seen.append(bool(t.buffer.owner[place] == 255 - array[place]))
    )
    assert read.wait(WAIT_S)
    assert seen == [True]  # corrupted before anybody may look
    assert list(np.flatnonzero(copy != array)) == [place % NBYTES]
    assert np.array_equal(read_back(store, ticket), array)  # what is stored is whole


def test_faults_befall_together_in_their_order(make: MakeStore) -> None:
    """A gate first, the error after it; a failed read is not corrupted."""
    gate, begun = Event(), Event()
    store = make(Plan({("read", 0): Fault(gate=gate, error=OSError(errno.EIO, "injected"), flip_byte=0)}))
    ticket = write(store, pattern_at(64, NBYTES))
    read, copy = copy_of(store, ticket, before=begun.set)
    assert begun.wait(WAIT_S)
    assert read.error is None
    gate.set()
    with pytest.raises(StoreBroken, match="injected"):
        read.wait(WAIT_S)
    assert not copy.any()
