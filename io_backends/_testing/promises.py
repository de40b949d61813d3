"""Promises: the contract of `Store`, one function each, which raises AssertionError if its docstring does not hold.

What must happen in the middle of a transfer is provoked through `before`, which runs on the worker just before it, so
nothing here depends on timing.
"""

from __future__ import annotations

import itertools
import random
import threading
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np

from .._errors import StoreBroken, StoreClosed, StoreError, StoreFull, TransferCancelled
from .._store import Store
from .._ticket import DONE, FAILED, RUNNING, Ticket
from .probe import PAGE, WAIT_S, Gate, Memory, error_of, read_back, refusal, submit, written_to

_MIB = 1 << 20
_MOST_WORKERS = 64  # this many blocked transfers occupy every worker
_SIZES = (0, 1, 511, 512, 513, 4095, 4096, 65_537, _MIB + 1, 9 * _MIB)
_SKEWS = (0, 1, 64, 511, 4095)


def _round_trips(store: Store, keeps_memory: bool) -> None:
    """What was written comes back, from any address, in any size, into any memory, and nothing beside it changes."""
    alignment = store.alignment
    assert alignment >= 1, f"alignment is {alignment}"
    assert not alignment & (alignment - 1), f"alignment {alignment} is no power of two"
    for nbytes, skew in itertools.product(_SIZES, _SKEWS):
        if nbytes > _MIB and skew not in (0, 64):
            continue
        case = f"{nbytes} bytes at an address of {skew} modulo {PAGE}"
        source = Memory(nbytes, skew, seed=nbytes + skew)
        expected = source.content()
        ticket = written_to(store, source)
        assert (ticket.state, ticket.nbytes) == (DONE, nbytes), f"{case}: {ticket.state}, {ticket.nbytes}"
        assert ticket.moved_bytes >= nbytes, f"{case}: moved_bytes of the write is {ticket.moved_bytes}"
        assert source.content() == expected, f"{case}: a write changed its source"
        if not keeps_memory:
            source.clear()
        for there, padded in ((skew, True), (skew, False), ((skew + 77) % PAGE, False)):
            target = Memory(nbytes, there, seed=None)
            around = target.around()
            read = store.read(ticket.location, target.buffer(padded=padded))
            assert read.wait(WAIT_S), f"{case}: a read did not end within {WAIT_S:g} s"
            assert target.content() == expected, f"{case}: other bytes came back (padded={padded}, into {there})"
            assert padded or target.around() == around, f"{case}: a read wrote beside its range (into {there})"
            assert read.moved_bytes >= nbytes, f"{case}: moved_bytes of the read is {read.moved_bytes}"
        if nbytes % 3:  # some stay, as neighbors
            store.discard(ticket)
    assert store.alignment == alignment, "alignment changed"


def _lifetimes(store: Store, keeps_memory: bool) -> None:
    """A ticket keeps its buffer's owner alive until the transfer has ended, and no longer."""
    written = written_to(store, Memory(5000))
    for reading in (False, True):
        kind = "read" if reading else "write"
        with Gate() as gate:
            memory = Memory(5000)
            watched, buffer = weakref.ref(memory), memory.buffer()
            ticket = submit(store, written.location, buffer, reading=reading, before=gate)
            del memory, buffer
            assert gate.begun.acquire(timeout=WAIT_S), f"a {kind} never began"
            assert watched() is not None, f"the memory of a running {kind} went away"
        assert ticket.wait(WAIT_S), f"a {kind} did not end within {WAIT_S:g} s"
        if keeps_memory and not reading:
            assert watched() is not None, "the memory of a write went away, and with it what was stored"
            store.discard(ticket)
        assert watched() is None, f"the memory of a {kind} that has ended is still held"


def _waiting(store: Store, keeps_memory: bool) -> None:
    """`wait` gives up at its timeout, may be repeated, and wakes every waiter."""
    with Gate() as gate:
        memory = Memory(5000)
        ticket = store.write(memory.buffer(), before=gate)
        woken: list[bool] = []
        waiters = [threading.Thread(target=lambda: woken.append(ticket.wait(WAIT_S))) for _ in range(3)]
        for waiter in waiters:
            waiter.start()
        for timeout_s in (0, 0.01):
            assert ticket.wait(timeout_s) is False, f"wait({timeout_s}) of an unfinished transfer returned True"
        assert not ticket.done(), "an unfinished transfer says it is done"
    for waiter in waiters:
        waiter.join(WAIT_S)
    assert woken == [True] * 3, f"three waiters got {woken}"
    assert ticket.wait(0) is True, "a second wait for an ended transfer returned False"
    assert ticket.done(), "an ended transfer says it is not done"
    assert 0 < ticket.started_s <= ticket.ended_s, f"it ran from {ticket.started_s} to {ticket.ended_s}"
    assert not ticket.cancel(), "an ended transfer was cancelled"


def _cancelling(store: Store, keeps_memory: bool) -> None:
    """A transfer can be cancelled until it starts: its memory goes, its waiters are told, no callback runs."""
    written = written_to(store, Memory(100))
    for reading in (False, True):
        called: list[str] = []

        def begin(reading: bool = reading, **callbacks: Callable[..., None]) -> tuple[Ticket, weakref.ref[Memory]]:
            memory = Memory(100)
            ticket = submit(store, written.location, memory.buffer(), reading=reading, **callbacks)
            return ticket, weakref.ref(memory)

        with Gate() as gate:
            # Each worker is blocked by one of these, so the transfer behind them is queued.
            ahead = [begin(before=gate)[0] for _ in range(_MOST_WORKERS)]
            callbacks = partial(called.append, "before"), lambda _, to=called: to.append("on_done")
            ticket, watched = begin(before=callbacks[0], on_done=callbacks[1])
            assert gate.begun.acquire(timeout=WAIT_S), "a transfer never began"
            begun = [other for other in ahead if other.state is RUNNING]
            assert begun, "a transfer whose `before` runs is not RUNNING"
            assert not begun[0].cancel(), "a running transfer was cancelled"
            assert ticket.cancel(), f"behind {_MOST_WORKERS} transfers that wait, one was not queued"
            assert watched() is None, "the memory of a cancelled transfer is still held"
            assert ticket.done(), "a cancelled transfer says it is not done"
            assert isinstance(error_of(ticket), TransferCancelled), "a wait for a cancelled transfer did not say so"
            assert not ticket.cancel(), "a transfer was cancelled twice"
        for other in ahead:
            assert error_of(other) is None, f"a transfer beside a cancelled one failed: {other.error}"
        if not reading:
            for other in (*ahead, ticket):
                store.discard(other)
        assert called == [], f"of a cancelled transfer {called} ran"
    assert read_back(store, written) == Memory(100).content(), "after a cancelled read other bytes came back"


def _failing(store: Store, keeps_memory: bool) -> None:
    """What `before` raises replaces the transfer, reaches every waiter, and leaves the store as it was."""
    written = written_to(store, Memory(5000))
    for error, kind in ((OSError(5, "told to fail"), StoreBroken), (StoreFull("told to fail"), StoreFull)):
        for reading in (False, True):
            memory, done = Memory(5000, seed=1), list[BaseException | None]()

            def before(error: Exception = error) -> None:
                raise error

            def on_done(ticket: Ticket, done: list[BaseException | None] = done) -> None:
                done.append(ticket.error)

            ticket = submit(store, written.location, memory.buffer(), reading=reading, before=before, on_done=on_done)
            for _ in range(2):
                got = error_of(ticket)
                assert isinstance(got, kind), f"{error!r} reached a waiter as {got!r}, not as {kind.__name__}"
                assert "told to fail" in str(got), f"{error!r} reached a waiter as {got!r}"
            assert ticket.state is FAILED, f"a failed transfer is {ticket.state}"
            assert ticket.moved_bytes == 0, f"a transfer that never began moved {ticket.moved_bytes} bytes"
            assert memory.content() == Memory(5000, seed=1).content(), "a read that never began changed its memory"
            assert done == [ticket.error], f"on_done saw {done}, the waiters {ticket.error!r}"
            watched = weakref.ref(memory)
            del memory
            assert watched() is None, "the memory of a failed transfer is still held"
            if not reading:
                store.discard(ticket)
    assert read_back(store, written) == Memory(5000).content(), "after failures other bytes came back"


def _callbacks(store: Store, keeps_memory: bool) -> None:
    """`before`, the transfer, `on_done`, once each and in this order, before any waiter wakes."""
    seen: list[str] = []
    source, target = Memory(5000), Memory(5000, seed=None)

    def on_done(ticket: Ticket) -> None:
        early = "" if ticket.wait(0) is False else ", a waiter would have been woken already"
        seen.append(f"done, {'with' if ticket.buffer is not None else 'without'} its buffer{early}")

    written = store.write(source.buffer(), before=lambda: seen.append("before"), on_done=on_done)
    assert written.wait(WAIT_S), "a write did not end"
    read = store.read(
        written.location,
        target.buffer(),
        before=lambda: seen.append(f"before, {'ahead of' if not any(target.content()) else 'after'} the read"),
        on_done=on_done,
    )
    assert read.wait(WAIT_S), "a read did not end"
    expected = ["before", "done, with its buffer", "before, ahead of the read", "done, with its buffer"]
    assert seen == expected, f"what ran: {seen}"

    def fail(_: Ticket) -> None:
        raise RuntimeError("told to fail")

    ticket = store.write(source.buffer(), on_done=fail)
    error = error_of(ticket)
    assert isinstance(error, StoreError), f"an on_done that raises reached the waiter as {error!r}"
    store.discard(ticket)


def _sizes(store: Store, keeps_memory: bool) -> None:
    """A read into a buffer of another size is a ValueError."""
    ticket = written_to(store, Memory(1000))
    for nbytes in (0, 999, 1001):
        said = refusal(partial(store.read, ticket.location, Memory(nbytes).buffer()), ValueError)
        assert said, f"reading 1000 bytes into a buffer of {nbytes} raised no ValueError"
        assert "1000" in said, f"the error does not name the 1000 bytes written: {said}"
        assert str(nbytes) in said, f"the error does not name the buffer's {nbytes} bytes: {said}"


def _arrays(store: Store, keeps_memory: bool) -> None:
    """Arrays may be passed directly; a non-contiguous one, or a read-only one for a read, is refused."""
    source = np.frombuffer(Memory(8000).content(), np.float32)  # read-only, which a write may be
    ticket = store.write(source)
    assert ticket.wait(WAIT_S), "a write of an array did not end"
    target = np.zeros((40, 50), np.float32)
    read = store.read(ticket.location, target)
    assert read.wait(WAIT_S), "a read into an array did not end"
    assert target.tobytes() == source.tobytes(), "an array came back as other bytes"
    for use, said in (
        (partial(store.write, target[:, ::2]), "contiguous"),
        (partial(store.read, ticket.location, target.T), "contiguous"),
        (partial(store.read, ticket.location, source), "read-only"),
    ):
        error = refusal(use, ValueError)
        assert error is not None, f"an array was taken although its error should have said {said!r}"
        assert said in error, f"the error does not say {said!r}: {error}"


def _discarding(store: Store, keeps_memory: bool) -> None:
    """`discard` may come in any state and any number of times, and harms no other write."""
    kept = [written_to(store, Memory(40_000, seed=seed)) for seed in range(3)]
    with Gate() as gate:
        held = [store.write(Memory(9000).buffer(), before=gate) for _ in range(_MOST_WORKERS + 1)]
        assert gate.begun.acquire(timeout=WAIT_S), "a write never began"
        for ticket in held * 2:  # running and queued
            store.discard(ticket)
        late = store.write(Memory(30_000, seed=7).buffer())
    for ticket in held:
        error = error_of(ticket)
        assert error is None or isinstance(error, TransferCancelled), f"a discarded write ended with {error!r}"
        store.discard(ticket)
    assert error_of(late) is None, f"a write beside discarded ones failed: {late.error}"
    cancelled = store.write(Memory(10).buffer())
    cancelled.cancel()
    for ticket in (kept[1], kept[1], cancelled, cancelled):
        store.discard(ticket)
    fresh = written_to(store, Memory(60_000, seed=9))
    for ticket, nbytes, seed in ((kept[0], 40_000, 0), (kept[2], 40_000, 2), (late, 30_000, 7), (fresh, 60_000, 9)):
        same = read_back(store, ticket) == Memory(nbytes, seed=seed).content()
        assert same, f"the write of {nbytes} bytes beside discarded ones came back as other bytes"


def _reusing(store: Store, keeps_memory: bool) -> None:
    """Discarded space is reused: a periodic load stops growing."""
    memories = [Memory(nbytes, 64 * index) for index, nbytes in enumerate((4 * _MIB, 100_000, 3 * _MIB + 7))]
    peaks = []
    for _ in range(30):
        tickets = [written_to(store, memory) for memory in memories]
        peaks.append(store.allocated_bytes())
        for ticket in tickets:
            store.discard(ticket)
    total = sum(memory.nbytes for memory in memories)
    assert peaks[0] >= total, f"with {total} bytes stored allocated_bytes() is {peaks[0]}"
    assert max(peaks[3:]) <= max(peaks[:3]), f"allocated bytes grew from {max(peaks[:3])} to {max(peaks[3:])}"


def _crowds(store: Store, keeps_memory: bool) -> None:
    """Many threads may use the store at once."""
    wrong: list[str] = []

    def work(number: int) -> None:
        choose = random.Random(number)
        try:
            for turn in range(25):
                memories = [Memory(choose.randrange(1, 60_000), choose.randrange(PAGE), turn) for _ in range(3)]
                tickets = [store.write(memory.buffer()) for memory in memories]
                if choose.random() < 0.3:
                    store.discard(tickets.pop())
                for ticket, memory in zip(tickets, memories, strict=False):
                    assert ticket.wait(WAIT_S), "a write did not end"
                    same = read_back(store, ticket, choose.randrange(PAGE)) == memory.content()
                    assert same, f"{ticket.nbytes} bytes came back as others"
                    store.discard(ticket)
        except Exception as error:
            wrong.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [], "; ".join(wrong)


def _closing(store: Store, keeps_memory: bool) -> None:
    """After `close` every transfer has ended and every call is refused; a second `close` does nothing."""
    done, memory = written_to(store, Memory(5000)), Memory(5000)
    with Gate() as gate:
        running = [store.write(Memory(5000).buffer(), before=gate) for _ in range(_MOST_WORKERS + 1)]
        assert gate.begun.acquire(timeout=WAIT_S), "a write never began"
        store.abandon()  # must not wait, or the gate would never open
    store.close()
    for ticket in running:
        error = error_of(ticket)
        assert error is None or isinstance(error, StoreClosed), f"a write in flight at close ended with {error!r}"
    assert any(error_of(ticket) for ticket in running), "with many writes queued close failed none of them"
    for _ in range(2):
        store.close()
        store.abandon()
    for use in (partial(store.write, memory.buffer()), partial(store.read, done.location, memory.buffer())):
        assert refusal(use, StoreClosed), "a write or a read after close raised no StoreClosed"
    assert done.wait(0), "a write that had ended well before close does not say so any more"
    for ticket in (done, running[0], running[0]):
        store.discard(ticket)
    assert store.allocated_bytes() >= 0, "allocated_bytes() after close is negative"


PROMISES = (
    _round_trips,
    _lifetimes,
    _waiting,
    _cancelling,
    _failing,
    _callbacks,
    _sizes,
    _arrays,
    _discarding,
    _reusing,
    _crowds,
    _closing,
)
