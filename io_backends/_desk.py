"""Desk: where one worker works, and what it has in hand.

Guarantee: what leaves a queue for a desk can be found all the time by whoever looks in the queue first, then here.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

_TAKING = object()  # in hand: what is just coming out of a queue


class Desk:
    """Whoever succeeds a dead worker sits down at the same.

    Attributes:
        busy: held during a job, and while the worker looks for one.
        jobs: what the worker has, several where it runs them together.
        thread: the worker.
    """

    __slots__ = ("busy", "jobs", "thread")

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.jobs: list[object] = []
        self.thread: threading.Thread | None = None

    def take(self, queue: deque[Any]) -> Any:
        """The next of a queue; None where another worker has just taken the last."""
        self.jobs.append(_TAKING)
        try:
            self.jobs[-1] = job = queue.popleft()
        except IndexError:
            self.jobs.pop()
            return None
        return job

    @property
    def idle(self) -> bool:
        """Whether nothing is in hand: its worker sleeps, or is on its way to a queue."""
        return self.jobs in ([], [_TAKING])

    def has(self, job: object) -> bool:
        """Whether a job is in hand, or may be."""
        return _TAKING in self.jobs or job in self.jobs  # in this order: the one becomes the other
