"""Writes that a worker takes several of: none is lost or run twice, and each has its own error."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from io_backends import Buffer, StoreBroken, Ticket
from io_backends._testing.probe import error_of
from support.stores import WAIT_S
from support.workers import Blocker, nothing, running, ticket_of


class Together:
    """A batch_writer that takes everything and does what the test says."""

    def __init__(self, write: Callable[[Sequence[Ticket]], None]) -> None:
        self._write = write

    def takes(self, tickets: Sequence[Ticket], another: Ticket) -> bool:
        return True

    def write(self, tickets: Sequence[Ticket]) -> None:
        self._write(tickets)


class DeadlyAtTheEnd(Ticket):
    """Ends its worker's loop once it is over."""

    def finish(self) -> None:
        super().finish()
        raise SystemExit("the thread ends here")


def test_a_worker_that_dies_among_them_fails_the_rest() -> None:
    with running(1) as workers:
        workers.batch_writer = Together(lambda _: None)
        blocker = Blocker()
        blocker.occupy(workers)
        deadly = DeadlyAtTheEnd(Buffer(0, 8, None), None, nothing)
        others = [ticket_of(nothing) for _ in range(2)]
        for ticket in (deadly, *others):
            workers.submit(ticket, urgent=False)
        blocker.release.set()
        assert deadly.wait(WAIT_S)
        errors = [error_of(ticket) for ticket in others]
        assert [type(error) for error in errors] == [StoreBroken] * 2
        assert all("died: SystemExit" in str(error) for error in errors)


def test_writes_go_together_and_reads_ahead_of_them() -> None:
    order: list[str] = []
    with running(1) as workers:
        workers.batch_writer = Together(lambda tickets: order.append(f"{len(tickets)} writes"))
        blocker = Blocker()
        blocker.occupy(workers)
        tickets = [ticket_of(lambda _: order.append("read")) for _ in range(6)]
        for number, ticket in enumerate(tickets):
            workers.submit(ticket, urgent=number % 3 == 2)
        assert tickets[0].cancel()
        blocker.release.set()
        assert all(ticket.wait(WAIT_S) for ticket in tickets[1:])
    assert order == ["read", "read", "3 writes"]


def test_where_they_cannot_go_together_each_goes_alone() -> None:
    ran: list[int] = []

    def fail(_: Sequence[Ticket]) -> None:
        raise SystemExit("even so")

    with running(1) as workers:
        workers.batch_writer = Together(fail)
        blocker = Blocker()
        blocker.occupy(workers)
        tickets = [ticket_of(lambda _, number=number: ran.append(number)) for number in range(3)]  # type: ignore[misc]
        for ticket in tickets:
            workers.submit(ticket, urgent=False)
        blocker.release.set()
        assert all(ticket.wait(WAIT_S) for ticket in tickets)
    assert ran == [0, 1, 2]


def test_workers_on_their_way_to_the_queue_get_what_lies_there() -> None:
    """All have been woken and none has taken anything yet: who comes first leaves the others theirs."""
    together = list[int]()
    with running(3) as workers:
        workers.batch_writer = Together(lambda tickets: together.append(len(tickets)))
        tickets = [ticket_of(nothing) for _ in range(3)]
        with workers._taking:
            for ticket in tickets:
                workers.submit(ticket, urgent=False)
            while not all(slot.busy.locked() for slot in workers._slots):
                time.sleep(0.001)
        assert all(ticket.wait(WAIT_S) for ticket in tickets)
    assert together == []
