"""Workers: which ticket runs when, what failing and stopping do to the others, and what an idle worker remembers."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque

import pytest

from io_backends import StoreClosed, Ticket, TicketState
from io_backends._workers.workers import Workers
from support.stores import WAIT_S, once
from support.workers import Blocker, Owner, never, nothing, running, threads_of, ticket_of


def test_no_thread_before_the_first_ticket_then_named_daemons() -> None:
    with running(3) as workers:
        assert threads_of(workers) == []
        ticket = ticket_of(nothing)
        workers.submit(ticket, urgent=True)
        assert ticket.wait(WAIT_S)
        names = [thread.name for thread in threads_of(workers)]
        assert len(set(names)) == 3
        assert all(name.startswith("tba-test-") for name in names)
        assert all(thread.daemon for thread in threads_of(workers))
    assert not any(thread.is_alive() for thread in threads_of(workers))


def test_a_store_needs_a_worker() -> None:
    with pytest.raises(ValueError, match="at least one worker, got 0"):
        Workers(0, "tba-test", never)


def limit_threads(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Have the process start so many threads more, as a container may."""
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(started) >= most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def test_as_many_threads_as_can_be_started_do_all_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_threads(monkeypatch, 1)
    with running(3) as workers:
        tickets = [workers.submit(ticket_of(nothing), urgent=True) for _ in range(5)]
        assert all(ticket.wait(WAIT_S) for ticket in tickets)
        assert len(threads_of(workers)) == 1
    assert workers.ended


def test_without_any_thread_a_submission_fails_and_a_later_one_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []
    workers = Workers(2, "tba-test", lambda: stopped.append(True))
    with monkeypatch.context() as patch:
        limit_threads(patch, 0)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            workers.submit(ticket_of(nothing), urgent=True)
    ticket = workers.submit(ticket_of(nothing), urgent=True)
    assert ticket.wait(WAIT_S)
    threads = threads_of(workers)
    assert len(threads) == 2
    workers.stop()
    workers.join()
    assert workers.ended
    assert stopped == [True]
    assert not any(thread.is_alive() for thread in threads)


def test_what_a_thread_does_between_two_tickets_is_the_next_ones() -> None:
    took_s = []

    def land(_: Ticket) -> None:
        begun_s = time.thread_time()
        while time.thread_time() < begun_s + 0.01:
            pass
        took_s.append(time.thread_time() - begun_s)

    with running() as workers:
        first, second = ticket_of(on_done=land), ticket_of()
        for ticket in (first, second):
            workers.submit(ticket, urgent=True)
            assert ticket.wait(WAIT_S)
    assert second.cpu_s >= took_s[0]


def test_reads_go_ahead_of_writes_each_in_order() -> None:
    order: list[str] = []
    with running() as workers:
        blocker = Blocker()
        blocker.occupy(workers)
        tickets = []
        for name in ("write 0", "read 0", "write 1", "read 1"):
            ticket = ticket_of(lambda _, name=name: order.append(name))  # type: ignore[misc]
            workers.submit(ticket, urgent=name.startswith("read"))
            tickets.append(ticket)
        blocker.release.set()
        assert all(ticket.wait(WAIT_S) for ticket in tickets)
    assert order == ["read 0", "read 1", "write 0", "write 1"]


@pytest.mark.parametrize("urgent", [True, False])
def test_an_idle_worker_remembers_nothing_of_its_last_ticket(urgent: bool) -> None:
    gc.disable()  # a reference cycle would be as bad: memory must go now, not at the next collection
    try:
        with running() as workers:
            owner, location = Owner(), Owner()
            watched_owner, watched_location = weakref.ref(owner), weakref.ref(location)

            def work(ticket: Ticket) -> None:
                assert ticket.buffer is not None
                assert ticket.buffer.owner is not None

            watched_work = weakref.ref(work)
            ticket = ticket_of(work, owner, location)
            del owner, location, work
            workers.submit(ticket, urgent=urgent)
            assert ticket.wait(WAIT_S)
            assert watched_owner() is None  # goes before a waiter wakes, although the ticket lives on
            del ticket
            with workers.held():  # now the worker is between two tickets
                assert watched_work() is None
                assert watched_location() is None
    finally:
        gc.enable()


def test_stopping_lets_the_running_ticket_end_and_fails_the_queued() -> None:
    stopped: list[str] = []
    with running(on_stopped=lambda: stopped.append(threading.current_thread().name)) as workers:
        blocker = Blocker()
        blocker.occupy(workers)
        queued = [ticket_of(nothing) for _ in range(4)]
        for index, ticket in enumerate(queued):
            workers.submit(ticket, urgent=index % 2 == 0)
        (name,) = [thread.name for thread in threads_of(workers)]
        workers.stop()
        workers.stop()
        assert stopped == []
        with pytest.raises(StoreClosed, match="the store is closed"):
            workers.submit(ticket_of(nothing), urgent=False)
        blocker.release.set()
        workers.join()
        assert blocker.ticket.state is TicketState.DONE
        for ticket in queued:
            with pytest.raises(StoreClosed, match="before this transfer started"):
                ticket.wait(WAIT_S)
        assert stopped == [name]


def test_stopping_before_anything_was_queued_calls_back_at_once() -> None:
    stopped: list[bool] = []
    workers = Workers(2, "tba-test", lambda: stopped.append(True))
    workers.stop()
    workers.join()
    assert stopped == [True]
    with pytest.raises(StoreClosed):
        workers.submit(ticket_of(nothing), urgent=True)


def test_submit_and_stop_at_the_same_time_lose_no_ticket_and_no_thread() -> None:
    """Whatever was accepted ends: done, or failed with StoreClosed."""
    for _ in range(100):
        workers = Workers(2, "tba-test", never)
        begin = threading.Barrier(3)
        accepted: list[Ticket] = []

        def submit(workers: Workers = workers, begin: threading.Barrier = begin, to: list[Ticket] = accepted) -> None:
            begin.wait(WAIT_S)
            for _ in range(8):
                ticket = ticket_of(nothing)
                try:
                    workers.submit(ticket, urgent=False)
                except StoreClosed:
                    return
                to.append(ticket)

        submitters = [threading.Thread(target=submit) for _ in range(2)]
        for thread in submitters:
            thread.start()
        begin.wait(WAIT_S)
        workers.stop()
        for thread in submitters:
            thread.join()
        workers.join()
        assert not any(thread.is_alive() for thread in threads_of(workers))
        for ticket in accepted:
            try:
                assert ticket.wait(WAIT_S)
            except StoreClosed:
                assert ticket.state is TicketState.FAILED


def test_stop_while_the_first_ticket_starts_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stop` sees no thread to end yet; they must end all the same."""
    workers = Workers(2, "tba-test", never)
    start = threading.Thread.start

    def stop_then_start(thread: threading.Thread) -> None:
        workers.stop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", stop_then_start)
    ticket = ticket_of(nothing)
    workers.submit(ticket, urgent=False)
    with pytest.raises(StoreClosed):
        ticket.wait(WAIT_S)
    workers.join()
    assert len(threads_of(workers)) == 2
    assert not any(thread.is_alive() for thread in threads_of(workers))


def test_a_ticket_queued_after_the_last_worker_has_ended_fails() -> None:
    class Late(deque[Ticket]):
        def append(self, ticket: Ticket) -> None:
            workers.stop()  # `submit` has looked already
            workers.join()
            super().append(ticket)

    with running() as workers:
        first, late = ticket_of(nothing), ticket_of(nothing)
        workers.submit(first, urgent=False)
        assert first.wait(WAIT_S)
        workers._reads = Late()
        workers.submit(late, urgent=True)
        with pytest.raises(StoreClosed):
            late.wait(WAIT_S)


class _Announcing:
    """A worker's lock that tells when anyone but the worker asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked = threading.Event()

    def acquire(self, timeout: float = -1) -> bool:
        if not threading.current_thread().name.startswith("tba-"):
            self.asked.set()
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_held_waits_for_the_running_ticket_and_holds_the_next() -> None:
    with running() as workers:
        lock = _Announcing()
        workers._slots[0].busy = lock  # type: ignore[assignment]
        blocker = Blocker()
        blocker.occupy(workers)

        def release() -> None:
            assert lock.asked.wait(WAIT_S)
            blocker.release.set()

        releaser = threading.Thread(target=release)
        releaser.start()
        assert not blocker.ticket.done()
        with workers.held():
            assert blocker.ticket.done()
            late = ticket_of(nothing)
            workers.submit(late, urgent=True)
            assert not late.wait(0.05)
        assert late.wait(WAIT_S)
        releaser.join()


def test_a_forgotten_set_of_workers_takes_nothing_more() -> None:
    workers = Workers(1, "tba-test", never)
    workers.forget()
    with pytest.raises(StoreClosed):
        workers.submit(ticket_of(nothing), urgent=True)
    workers.join()


def test_at_the_interpreter_s_exit_the_running_ticket_ends_and_no_other_begins() -> None:
    workers = Workers(1, "tba-test", never)
    blocker = Blocker()
    blocker.occupy(workers)
    begun: list[Ticket] = []
    queued = ticket_of(begun.append)
    workers.submit(queued, urgent=False)
    releaser = once(lambda: workers._frozen, blocker.release.set)
    workers.freeze(time.monotonic() + WAIT_S)
    assert blocker.ticket.done()
    releaser.join()
    workers.join()  # waits for nobody
    with pytest.raises(StoreClosed):
        workers.submit(ticket_of(nothing), urgent=True)
    with pytest.raises(StoreClosed, match="interpreter is exiting"):
        queued.wait(WAIT_S)
    assert begun == []
    workers._slots[0].busy.release()  # so that this test's thread ends
    for thread in threads_of(workers):
        workers._tokens.put(False)
        thread.join(WAIT_S)


def test_freezing_does_not_wait_for_a_transfer_that_hangs() -> None:
    workers = Workers(1, "tba-test", never)
    blocker = Blocker()
    blocker.occupy(workers)
    workers.freeze(time.monotonic())
    assert not blocker.ticket.done()
    blocker.release.set()
    assert blocker.ticket.wait(WAIT_S)
    workers._tokens.put(False)
    for thread in threads_of(workers):
        thread.join(WAIT_S)
