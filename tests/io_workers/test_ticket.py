"""Ticket: one transfer seen by those who wait for it, cancel it, and are called back."""

from __future__ import annotations

import gc
import threading
import time
import weakref

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
)
from support.stores import WAIT_S
from support.workers import Owner, ticket_of


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
    ticket = ticket_of(lambda t: seen.append(t.state), before=lambda: seen.append(ticket.state), location="somewhere")
    assert (ticket.state, ticket.done(), ticket.nbytes, ticket.location) == (TicketState.QUEUED, False, 8, "somewhere")
    run(ticket)
    assert seen == [TicketState.RUNNING, TicketState.RUNNING]
    assert (ticket.state, ticket.done(), ticket.error) == (TicketState.DONE, True, None)
    assert 0 < ticket.started_s <= ticket.ended_s
    assert ticket.wait() is True
    assert not ticket.start()
    assert not ticket.cancel()


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
