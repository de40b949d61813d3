"""Writes that a worker takes several of: none is lost, run twice or out of sight, whatever another worker does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from io_backends import Buffer, StoreBroken, Ticket
from io_backends._probe import error_of
from support.stores import WAIT_S
from support.workers import Blocker, nothing, running, ticket_of


class Together:
    """A gatherer that takes everything and does what the test says."""

    def __init__(self, write: Callable[[Sequence[Ticket]], None]) -> None:
        self._write = write

    def takes(self, tickets: Sequence[Ticket], another: Ticket) -> bool:
        return True

    def write(self, tickets: Sequence[Ticket]) -> None:
        self._write(tickets)


def test_a_waiter_finds_its_ticket_while_it_is_moved_with_others() -> None:
    looked: list[bool] = []
    with running(1) as workers:
        workers.gatherer = Together(lambda _: looked.extend(workers._has(ticket) for ticket in tickets))
        blocker = Blocker()
        blocker.occupy(workers)
        tickets = [ticket_of(nothing) for _ in range(4)]
        for ticket in tickets:
            workers.submit(ticket, urgent=False)
        blocker.release.set()
        assert all(ticket.wait(WAIT_S) for ticket in tickets)
    assert looked == [True] * 4


class DeadlyAtTheEnd(Ticket):
    """Ends its worker's loop once it is over."""

    def finish(self) -> None:
        super().finish()
        raise SystemExit("the thread ends here")


def test_a_worker_that_dies_among_them_fails_the_rest_and_is_replaced() -> None:
    with running(1) as workers:
        workers.gatherer = Together(lambda _: None)
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
        assert all("died: SystemExit" in str(error) for error in errors), "told by the dying worker, at once"
        after = ticket_of(nothing)
        workers.submit(after, urgent=False)
        assert after.wait(WAIT_S)


@pytest.mark.parametrize("behind", [0, 2])
def test_of_two_workers_that_reach_for_the_same_one_each_ticket_is_run_once(behind: int) -> None:
    """What was first in the queue a moment ago is another worker's; what comes out is the one behind, or none."""
    runs, together, found = list[int](), list[int](), list[bool]()
    with running(1) as workers:
        gatherer = Together(lambda tickets: together.append(len(tickets)))
        workers.gatherer = gatherer
        blocker = Blocker()
        blocker.occupy(workers)
        tickets = [ticket_of(lambda _, number=number: runs.append(number)) for number in range(3 + behind)]  # type: ignore[misc]

        class Watched(deque[Ticket]):
            def popleft(self) -> Ticket:
                ticket = super().popleft()
                found.append(workers._has(ticket))  # out of the queue, and not at the desk yet
                return ticket

        workers._writes = Watched()
        for ticket in tickets:
            workers.submit(ticket, urgent=False)
        takes = gatherer.takes

        def takes_late(taken: Sequence[Ticket], another: Ticket) -> bool:
            if another is tickets[2]:  # the other worker is faster
                assert deque.popleft(workers._writes) is tickets[2]
                assert tickets[2].start()
                tickets[2].run(lambda: 0.0)
            return takes(taken, another)

        gatherer.takes = takes_late  # type: ignore[method-assign]
        blocker.release.set()
        assert all(ticket.wait(WAIT_S) for ticket in tickets)
    assert sorted(runs) == [2, 3, 4][: 1 + behind], "the first two went together"
    assert together == [2]
    assert found
    assert all(found)


def test_workers_on_their_way_to_the_queue_get_what_lies_there() -> None:
    """All have been woken and none has taken anything yet: who comes first leaves the others theirs."""
    at_the_queue = threading.Barrier(3)
    together = list[int]()

    class Slow(deque[Ticket]):
        def popleft(self) -> Ticket:
            at_the_queue.wait(WAIT_S)
            return super().popleft()

    with running(3) as workers:
        workers.gatherer = Together(lambda tickets: together.append(len(tickets)))
        workers._writes = Slow()
        tickets = [ticket_of(nothing) for _ in range(3)]
        for ticket in tickets:
            workers.submit(ticket, urgent=False)
        assert all(ticket.wait(WAIT_S) for ticket in tickets)
    assert together == []
