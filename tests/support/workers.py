"""What the tests of workers share: tickets that do what a test says, and pools that end with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from io_backends import Buffer, Ticket
from io_backends._workers.workers import Workers
from support.stores import WAIT_S


class Owner:
    """Stands for memory: a buffer's owner whose life can be watched."""


def nothing(ticket: Ticket) -> None:
    """A transfer that ends at once."""


def ticket_of(
    work: Callable[[Ticket], None] = nothing,
    owner: object = None,
    location: object = None,
    *,
    on_done: Callable[[Ticket], None] | None = None,
    before: Callable[[], None] | None = None,
) -> Ticket:
    return Ticket(Buffer(0, 8, owner), location, work, on_done, before)


def never() -> None:
    """For whoever does not care when the last worker has ended."""


@contextmanager
def running(count: int = 1, on_stopped: Callable[[], None] = never) -> Iterator[Workers]:
    workers = Workers(count, "tba-test", on_stopped)
    try:
        yield workers
    finally:
        workers.stop()
        workers.join()


def threads_of(workers: Workers) -> list[threading.Thread]:
    return [slot.thread for slot in workers._slots if slot.thread is not None]


class Blocker:
    """A transfer that goes on until `release` is set."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.release = threading.Event()
        self.ticket = ticket_of(self._work)

    def _work(self, ticket: Ticket) -> None:
        self.begun.set()
        assert self.release.wait(WAIT_S)

    def occupy(self, workers: Workers) -> None:
        workers.submit(self.ticket, urgent=False)
        assert self.begun.wait(WAIT_S)
