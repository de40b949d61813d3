"""Workers that die and devices that hang: every ticket ends, or its waiters learn of it."""

from __future__ import annotations

import ctypes
import random
import time
import weakref
from contextlib import suppress

import pytest

from io_backends import Buffer, StoreBroken, StoreStalled, Ticket
from io_backends._workers.workers import Workers
from support.stores import WAIT_S
from support.workers import Blocker, Owner, never, nothing, running, threads_of, ticket_of


class Deadly(Ticket):
    """Ends its worker's loop: what it raises comes from outside of the transfer."""

    struck = False

    def start(self) -> bool:
        if not self.struck:
            self.struck = True
            raise SystemExit("the thread ends here")
        return super().start()


class DeadlyAtTheEnd(Deadly):
    def start(self) -> bool:
        return Ticket.start(self)

    def finish(self) -> None:
        if not self.struck:
            self.struck = True
            raise SystemExit("the thread ends here")
        super().finish()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", [Deadly, DeadlyAtTheEnd])
def test_a_loop_that_fails_breaks_the_store(kind: type[Ticket], count: int) -> None:
    """What this worker had and what is queued fails with the cause; another worker's running ticket ends well."""
    stopped: list[bool] = []
    with running(count, lambda: stopped.append(True)) as workers:
        blockers = [Blocker() for _ in range(count)]
        for blocker in blockers:
            blocker.occupy(workers)
        owner = Owner()
        watched = weakref.ref(owner)
        deadly = kind(Buffer(0, 8, owner), None, nothing)
        queued = ticket_of(nothing)
        del owner
        for ticket in (deadly, queued):
            workers.submit(ticket, urgent=False)
        blockers[0].release.set()
        with pytest.raises(StoreBroken, match=r"worker that had the transfer of 8 bytes died: SystemExit\('the thread"):
            deadly.wait(WAIT_S)
        assert watched() is None
        with pytest.raises(StoreBroken, match="a worker of the store died: SystemExit") as caught:
            workers.submit(ticket_of(nothing), urgent=True)
        assert isinstance(caught.value.__cause__, SystemExit)
        for blocker in blockers:
            blocker.release.set()
            assert blocker.ticket.wait(WAIT_S)
        with pytest.raises(StoreBroken, match="before this transfer ended: SystemExit"):
            queued.wait(WAIT_S)
    assert stopped == [True]
    assert not any(thread.is_alive() for thread in threads_of(workers))


def test_workers_hit_at_any_place_lose_no_ticket() -> None:
    """SystemExit thrown into the threads from outside, while they run tickets."""
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc
    throw.argtypes = (ctypes.c_ulong, ctypes.py_object)
    choose = random.Random(1)
    broken = 0
    for _ in range(40):
        tickets = [ticket_of(lambda _: time.sleep(0.0002 * choose.randrange(3))) for _ in range(6)]
        with running(2) as workers:
            for ticket in tickets:
                workers.submit(ticket, urgent=choose.random() < 0.5)
            thread = choose.choice(threads_of(workers))
            time.sleep(0.001 * choose.random())
            assert thread.ident is not None
            throw(thread.ident, SystemExit)
            for ticket in tickets:
                with suppress(StoreBroken):
                    assert ticket.wait(WAIT_S)
        broken += workers._cause is not None
    assert broken


def test_a_wait_fails_when_nothing_moves_and_the_ticket_goes_on() -> None:
    with running(1) as workers:
        workers.timeout_s = 0.1
        blocker = Blocker()
        blocker.occupy(workers)
        queued = ticket_of(nothing)
        workers.submit(queued, urgent=False)
        for ticket in (blocker.ticket, queued):
            with pytest.raises(StoreStalled, match=r"no byte of the store has moved for [\d.]+ s .* of 8 bytes"):
                ticket.wait()
            assert not ticket.done()
            assert ticket.buffer is not None
        assert queued.wait(0.01) is False  # a waiter with less patience than that is told so
        blocker.release.set()
        assert blocker.ticket.wait()
        assert queued.wait()


def test_no_timeout_waits_for_ever() -> None:
    workers = Workers(1, "tba-test", never, timeout_s=None)
    workers.moved_s = -1e9
    assert workers.stalled_s(-1e9) == 0.0
    assert workers.period_s == 0.25
    workers.stop()
    for timeout_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="a timeout must be positive, or None for never"):
            Workers(1, "tba-test", never, timeout_s=timeout_s)


def test_a_thread_that_hangs_in_the_system_holds_up_nobody_for_ever() -> None:
    with running(1) as workers:
        workers.timeout_s = 0.1
        blocker = Blocker()
        blocker.occupy(workers)
        with workers.held():
            assert not blocker.ticket.done()
        blocker.release.set()
