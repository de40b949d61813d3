"""Ticket: one transfer seen by those who wait for it, cancel it, and are called back."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from io_backends import (
    Buffer,
    ShortTransfer,
    StoreBroken,
    StoreClosed,
    StoreError,
    StoreFull,
    Ticket,
    TicketState,
    TransferCancelled,
)
from support.stores import WAIT_S

OnDone = Callable[[Ticket], None]


class Owner:
    """Stands for memory: a buffer's owner whose life can be watched."""


def nothing(ticket: Ticket) -> None:
    """A transfer that ends at once."""


def ticket_of(
    work: Callable[[Ticket], None] = nothing,
    *,
    on_done: OnDone | None = None,
    before: Callable[[], None] | None = None,
    owner: object = None,
) -> Ticket:
    return Ticket(Buffer(0, 8, owner), "somewhere", work, on_done, before)


def run(ticket: Ticket) -> None:
    assert ticket.start()
    ticket.run(time.perf_counter)


def waiters(ticket: Ticket, count: int) -> tuple[list[threading.Thread], list[object]]:
    """Threads that wait for the ticket, and what each of them got; all of them wait before this returns."""
    got: list[object] = []
    ready = [threading.Event() for _ in range(count)]

    def wait(event: threading.Event) -> None:
        event.set()
        try:
            got.append(ticket.wait(WAIT_S))
        except StoreError as error:
            got.append(error)

    threads = [threading.Thread(target=wait, args=(event,)) for event in ready]
    for thread in threads:
        thread.start()
    assert all(event.wait(WAIT_S) for event in ready)
    return threads, got


def test_the_life_of_a_transfer_that_goes_well() -> None:
    seen: list[TicketState] = []
    ticket = ticket_of(lambda t: seen.append(t.state), before=lambda: seen.append(ticket.state))
    assert (ticket.state, ticket.done(), ticket.nbytes, ticket.location) == (TicketState.QUEUED, False, 8, "somewhere")
    run(ticket)
    assert seen == [TicketState.RUNNING, TicketState.RUNNING]
    assert (ticket.state, ticket.done(), ticket.error) == (TicketState.DONE, True, None)
    assert 0 < ticket.started_s <= ticket.ended_s
    assert ticket.wait() is True
    assert not ticket.start()
    assert not ticket.cancel()


def test_a_wait_with_a_timeout_gives_up_and_may_be_repeated() -> None:
    ticket = ticket_of()
    assert ticket.wait(0) is False
    assert ticket.wait(0.01) is False
    run(ticket)
    assert ticket.wait(0) is True


def test_every_waiter_is_woken() -> None:
    ticket = ticket_of()
    threads, got = waiters(ticket, 3)
    run(ticket)
    for thread in threads:
        thread.join()
    assert got == [True, True, True]


@pytest.mark.parametrize("kind", [StoreFull, ShortTransfer, StoreBroken, StoreClosed])
def test_every_waiter_gets_the_error(kind: type[StoreError]) -> None:
    def fail(_: Ticket) -> None:
        raise kind("told to fail")

    ticket = ticket_of(fail)
    threads, got = waiters(ticket, 3)
    run(ticket)
    for thread in threads:
        thread.join()
    assert got == [ticket.error] * 3
    assert type(ticket.error) is kind
    for _ in range(2):  # and so do those who come later
        with pytest.raises(kind, match="told to fail"):
            ticket.wait()
    assert ticket.state is TicketState.FAILED
    assert ticket.ended_s > 0


@pytest.mark.parametrize("cause", [OSError(5, "I/O"), ValueError("wrong"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("place", ["before", "work"])
def test_foreign_errors_are_carried_as_broken_with_their_cause(cause: BaseException, place: str) -> None:
    done: list[BaseException | None] = []

    def fail(*_: object) -> None:
        raise cause

    def on_done(ticket: Ticket) -> None:
        done.append(ticket.error)

    ticket = ticket_of(fail, on_done=on_done) if place == "work" else ticket_of(before=fail, on_done=on_done)
    run(ticket)
    with pytest.raises(StoreBroken, match=type(cause).__name__) as caught:
        ticket.wait()
    assert caught.value.__cause__ is cause
    assert done == [ticket.error]


def test_nothing_is_moved_when_before_fails() -> None:
    moved: list[Ticket] = []

    def fail() -> None:
        raise RuntimeError("the device is gone")

    run(ticket_of(moved.append, before=fail))
    assert moved == []


def test_cancelling_drops_the_buffer_and_tells_the_waiters() -> None:
    called: list[Ticket] = []
    owner = Owner()
    watched = weakref.ref(owner)
    ticket = ticket_of(called.append, on_done=called.append, owner=owner)
    del owner
    threads, got = waiters(ticket, 2)
    assert ticket.cancel()
    assert watched() is None
    for thread in threads:
        thread.join()
    assert [type(error) for error in got] == [TransferCancelled] * 2
    assert (ticket.state, ticket.done(), ticket.error) == (TicketState.CANCELLED, True, None)
    assert not ticket.cancel()
    assert not ticket.start()
    assert called == []
    with pytest.raises(TransferCancelled, match="8 bytes was cancelled before it started"):
        ticket.wait()


def test_a_running_transfer_cannot_be_cancelled() -> None:
    owner = Owner()
    watched = weakref.ref(owner)
    answers: list[object] = []
    ticket = ticket_of(lambda t: answers.append((t.cancel(), watched() is not None)), owner=owner)
    del owner
    run(ticket)
    assert answers == [(False, True)]
    assert ticket.state is TicketState.DONE


def test_on_done_runs_once_before_any_waiter_wakes_and_with_the_buffer() -> None:
    seen: list[tuple[bool, bool]] = []

    def on_done(ticket: Ticket) -> None:
        seen.append((ticket.buffer is not None, ticket.wait(0)))  # a waiter would still wait

    ticket = ticket_of(on_done=on_done)
    run(ticket)
    assert seen == [(True, False)]
    assert ticket.wait(0)
    assert ticket.buffer is None


def test_an_on_done_that_raises_is_carried_but_hides_no_error() -> None:
    def on_done(_: Ticket) -> None:
        raise RuntimeError("from the callback")

    ticket = ticket_of(on_done=on_done)
    run(ticket)
    with pytest.raises(StoreBroken, match="RuntimeError: from the callback"):
        ticket.wait()
    assert ticket.buffer is None

    def fail(_: Ticket) -> None:
        raise StoreFull("from the transfer")

    ticket = ticket_of(fail, on_done=on_done)
    run(ticket)
    with pytest.raises(StoreFull, match="from the transfer"):
        ticket.wait()


@pytest.mark.parametrize("chained", [False, True])
def test_a_failed_transfer_keeps_its_lines_but_not_its_memory(chained: bool) -> None:
    """The traceback of an error holds its frames, and their locals the buffer: as bad as a leak under a full disk."""

    def move(buffer: Buffer | None) -> None:
        if not chained:
            raise StoreFull("no space")
        try:
            raise OSError(28, "no space")
        except OSError as error:
            raise StoreFull("no space") from error

    def work(ticket: Ticket) -> None:
        buffer = ticket.buffer
        move(buffer)

    owner = Owner()
    watched = weakref.ref(owner)
    ticket = ticket_of(work, owner=owner)
    del owner
    gc.disable()
    try:
        run(ticket)
        assert ticket.error is not None
        assert watched() is None
    finally:
        gc.enable()
    names = []
    trace = ticket.error.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names == ["work", "move"]


def test_cancel_and_start_at_the_same_time_have_one_winner() -> None:
    for _ in range(100):
        ticket = ticket_of()
        begin = threading.Barrier(2)
        won: list[str] = []

        def cancel(ticket: Ticket = ticket, begin: threading.Barrier = begin, won: list[str] = won) -> None:
            begin.wait(WAIT_S)
            if ticket.cancel():
                won.append("cancel")

        thread = threading.Thread(target=cancel)
        thread.start()
        begin.wait(WAIT_S)
        if ticket.start():
            won.append("start")
            ticket.run(time.perf_counter)
        thread.join()
        assert len(won) == 1
        assert ticket.state is (TicketState.DONE if won == ["start"] else TicketState.CANCELLED)
