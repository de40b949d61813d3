"""Workers that die and devices that hang: every ticket ends or its waiters learn of it, and others take over."""

from __future__ import annotations

import ctypes
import random
import time
import weakref

import pytest

from io_backends import Buffer, StoreBroken, StoreStalled, Ticket
from io_backends._workers import MOST_DEATHS, Workers
from support.stores import WAIT_S
from support.workers import Blocker, Owner, never, nothing, running, threads_of, ticket_of


class Deadly(Ticket):
    """A ticket that ends its worker's loop: what it raises comes from outside of the transfer."""

    def start(self) -> bool:
        raise SystemExit("the thread ends here")


class DeadlyAtTheEnd(Ticket):
    def finish(self) -> None:
        if self.error is None:
            self.error = StoreBroken("ended by force")
            raise SystemExit("the thread ends here")
        super().finish()


@pytest.mark.parametrize("kind", [Deadly, DeadlyAtTheEnd])
def test_a_worker_that_dies_fails_its_ticket_and_is_replaced(kind: type[Ticket]) -> None:
    done: list[Ticket] = []
    with running(1) as workers:
        blocker = Blocker()
        blocker.occupy(workers)
        (dying,) = threads_of(workers)
        owner = Owner()
        watched = weakref.ref(owner)
        deadly = kind(Buffer(0, 8, owner), None, nothing, done.append)
        if kind is Deadly:  # `abort` claims it then: the first `start` took nothing
            deadly.start = SystemExitOnce(deadly)  # type: ignore[method-assign]
        after = ticket_of(nothing)
        del owner
        workers.submit(deadly, urgent=False)
        workers.submit(after, urgent=False)
        blocker.release.set()
        with pytest.raises(StoreBroken, match=r"transfer of 8 bytes died: SystemExit|ended by force"):
            deadly.wait(WAIT_S)
        assert watched() is None
        assert after.wait(WAIT_S)
        dying.join(WAIT_S)
        assert not dying.is_alive()
        (successor,) = threads_of(workers)
        assert successor is not dying
        assert successor.name == dying.name
    assert done in ([deadly], [])
    assert not successor.is_alive()


class SystemExitOnce:
    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._calls = 0

    def __call__(self) -> bool:
        self._calls += 1
        if self._calls == 1:
            raise SystemExit("the thread ends here")
        return Ticket.start(self._ticket)


def test_a_pool_whose_workers_keep_dying_gives_up_and_says_so() -> None:
    stopped: list[bool] = []
    with running(2, lambda: stopped.append(True)) as workers:
        tickets = []
        for _ in range(MOST_DEATHS + 5):
            ticket = ticket_of(nothing)
            ticket.start = SystemExitOnce(ticket)  # type: ignore[method-assign]
            tickets.append(ticket)
        refused = 0
        for ticket in tickets:
            try:
                workers.submit(ticket, urgent=False)
            except StoreBroken:
                refused += 1
                continue
            with pytest.raises(StoreBroken, match=r"died: SystemExit"):
                ticket.wait(WAIT_S)
        workers.join()
        with pytest.raises(StoreBroken, match=rf"{MOST_DEATHS + 1} workers .* died, the last of SystemExit\("):
            workers.submit(ticket_of(nothing), urgent=True)
    assert refused == 4
    assert stopped == [True]


def test_workers_hit_at_any_place_lose_no_ticket() -> None:
    """SystemExit thrown into the threads from outside, while they run tickets."""
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc
    throw.argtypes = (ctypes.c_ulong, ctypes.py_object)
    choose = random.Random(1)
    deaths = 0
    with running(2) as workers:
        for turn in range(60):
            tickets = [ticket_of(lambda _: time.sleep(0.0002 * choose.randrange(3))) for _ in range(6)]
            try:
                for ticket in tickets:
                    workers.submit(ticket, urgent=choose.random() < 0.5)
            except StoreBroken:
                break
            if turn % 3 == 0:
                thread = choose.choice(threads_of(workers))
                time.sleep(0.001 * choose.random())
                if thread.ident is not None:
                    throw(thread.ident, SystemExit)
            for ticket in tickets:
                try:
                    assert ticket.wait(WAIT_S)
                except StoreBroken:
                    deaths += 1
            for ticket in tickets:
                assert ticket.buffer is None
    assert deaths


def test_a_wait_learns_that_nobody_has_the_ticket() -> None:
    with running(1) as workers:
        workers.timeout_s = 0.2  # a waiter looks four times as often
        lost = ticket_of(nothing)
        lost.watch = workers
        with pytest.raises(StoreBroken, match="the worker that had the transfer of 8 bytes is gone"):
            lost.wait()
        assert not lost.done()


def test_a_wait_fails_when_nothing_moves_and_the_ticket_goes_on() -> None:
    with running(1) as workers:
        workers.timeout_s = 0.1
        blocker = Blocker()
        blocker.occupy(workers)
        queued = ticket_of(nothing)
        workers.submit(queued, urgent=False)
        for ticket in (blocker.ticket, queued):
            with pytest.raises(StoreStalled, match=r"no byte of the store has moved for 0\.\d+ s .* of 8 bytes"):
                ticket.wait()
            assert not ticket.done()
            assert ticket.buffer is not None
        assert queued.wait(0.01) is False  # a waiter with less patience than that is told so
        blocker.release.set()
        assert blocker.ticket.wait()
        assert queued.wait()


def test_what_moves_slowly_has_not_stalled() -> None:
    with running(1) as workers:
        workers.timeout_s = 0.2

        def crawl(_: Ticket) -> None:
            for _ in range(10):
                time.sleep(0.05)
                workers.moved_s = time.perf_counter()

        ticket = ticket_of(crawl)
        workers.submit(ticket, urgent=False)
        assert ticket.wait()


def test_no_timeout_waits_for_ever() -> None:
    workers = Workers(1, "tba-test", never, timeout_s=None)
    workers.moved_s = -1e9
    assert workers.stalled_s(-1e9) == 0.0
    assert workers.period_s == 0.25
    workers.stop()
    for timeout_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="a timeout must be positive, or None for never"):
            Workers(1, "tba-test", never, timeout_s=timeout_s)


@pytest.mark.parametrize("ending", ["join", "held"])
def test_a_thread_that_hangs_in_the_system_holds_up_nobody_for_ever(ending: str) -> None:
    with running(1) as workers:
        workers.timeout_s = 0.1
        blocker = Blocker()
        blocker.occupy(workers)
        if ending == "held":
            with workers.held():
                assert not blocker.ticket.done()
        else:
            workers.stop()
            workers.join()
            assert threads_of(workers)[0].is_alive()
        blocker.release.set()
