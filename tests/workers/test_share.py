"""Tasks that one ticket shares among the workers: who does them, how they fail, and what remains of them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest

from io_backends import StoreBroken, StoreFull, Ticket
from support.stores import WAIT_S
from support.workers import Blocker, Owner, nothing, running, threads_of, ticket_of


def test_idle_workers_help_with_what_one_shares() -> None:
    together = threading.Barrier(3)
    names: set[str] = set()

    def task() -> None:
        names.add(threading.current_thread().name)
        together.wait(WAIT_S)  # only three threads at once get past

    with running(3) as workers:
        ticket = ticket_of(lambda _: workers.share([task] * 3))
        workers.submit(ticket, urgent=False)
        assert ticket.wait(WAIT_S)
        assert names == {thread.name for thread in threads_of(workers)}


def test_tasks_are_done_by_their_own_worker_where_no_other_comes() -> None:
    ran: list[str] = []
    with running(2) as workers:
        blocker = Blocker()
        blocker.occupy(workers)
        assert workers.idle() == 1

        def work(_: Ticket) -> None:
            assert workers.idle() == 0
            for desk in workers._desks:
                if desk.has(blocker.ticket):
                    desk.jobs = []  # looks idle, and is not: the help offered never comes
            workers.share([lambda: ran.append(threading.current_thread().name)] * 5)

        ticket = ticket_of(work)
        workers.submit(ticket, urgent=False)
        assert ticket.wait(WAIT_S)
        assert len(ran) == 5
        assert len(set(ran)) == 1
        blocker.release.set()
        after = ticket_of(nothing)  # the late helper finds nothing, and goes on
        workers.submit(after, urgent=False)
        assert after.wait(WAIT_S)


@pytest.mark.parametrize("by", ["owner", "helper"])
def test_the_first_error_of_a_task_ends_the_ticket_when_all_have_left(by: str) -> None:
    order: list[str] = []
    both = threading.Barrier(2)
    owner: list[threading.Thread] = []

    def task() -> None:
        both.wait(WAIT_S)
        if (threading.current_thread() is owner[0]) == (by == "owner"):
            raise OSError(5, "told to fail")
        time.sleep(0.05)
        order.append("slow task ended")

    def work(_: Ticket) -> None:
        owner.append(threading.current_thread())
        workers.share([task, task, lambda: order.append("never")])

    with running(2) as workers:
        ticket = ticket_of(work)
        workers.submit(ticket, urgent=False)
        with pytest.raises(StoreBroken, match="told to fail"):
            ticket.wait(WAIT_S)
        order.append("ticket ended")
    assert order == ["slow task ended", "ticket ended"]


def test_tasks_keep_nothing_alive_once_they_have_ended() -> None:
    gc.disable()
    try:
        with running(2) as workers:
            for failing in (False, True):
                owner = Owner()
                watched = weakref.ref(owner)
                both = threading.Barrier(2)

                def task(memory: object, both: threading.Barrier = both, failing: bool = failing) -> None:
                    both.wait(WAIT_S)
                    if failing:
                        raise StoreFull("told to be full")

                def work(ticket: Ticket, task: Callable[[object], None] = task) -> None:
                    assert ticket.buffer is not None
                    owner = ticket.buffer.owner
                    workers.share([partial(task, owner), partial(task, owner)])

                ticket = ticket_of(work, owner)
                del owner
                workers.submit(ticket, urgent=False)
                with pytest.raises(StoreFull) if failing else nullcontext():
                    ticket.wait(WAIT_S)
                with workers.held():
                    assert watched() is None, failing
    finally:
        gc.enable()
