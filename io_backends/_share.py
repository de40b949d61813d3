"""Shared: the tasks of one transfer, done by the worker that has it and by others that happen to be idle.

Guarantees:

1. All that was begun has ended when `join` returns, so the memory worked on may go then.
2. Nobody is waited for who has not come: an offer not taken up is withdrawn.
3. A helper that dies is noticed, though it cannot tell: `join` asks whether anybody is still at it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from ._errors import StoreBroken

_LOOK_S = 0.5  # how often `join` asks; only a death makes it matter


class Shared:
    """Tasks in a queue that several threads empty together. An error stops all of them at their next task."""

    def __init__(self, tasks: list[Callable[[], None]]) -> None:
        self._count = len(tasks)
        self._tasks = deque(tasks)
        self._ended: deque[None] = deque()  # one for each task that went well
        self._offers: deque[None] = deque()
        self._offered = 0
        self._left: SimpleQueue[None] = SimpleQueue()
        self._error: BaseException | None = None

    def offer(self, helpers: int) -> None:
        """Ahead of all else: so many may help."""
        self._offered = helpers
        self._offers.extend([None] * helpers)

    def help(self) -> None:
        """On another worker. Returns at once when it comes too late."""
        try:
            self._offers.pop()
        except IndexError:
            return
        try:
            self.work()
        finally:
            self._left.put(None)

    def work(self) -> None:
        """Do tasks until none is left or one has failed."""
        while self._error is None:
            try:
                task = self._tasks.popleft()
            except IndexError:
                return
            try:
                task()
                self._ended.append(None)
            except BaseException as error:
                self._error = error

    def join(self, anybody: Callable[[], bool]) -> None:
        """On the owner, after its own `work`: withdraw the offers and wait for those who took one up."""
        with suppress(IndexError):
            while True:
                self._offers.pop()
                self._offered -= 1
        while self._offered:
            try:
                self._left.get(timeout=_LOOK_S)
                self._offered -= 1
            except Empty:
                if not anybody():
                    break
        self._tasks.clear()

    def finish(self) -> None:
        """After `join`: raise what went wrong."""
        error, self._error = self._error, None  # an error holds its frames, and they hold this
        if error is not None:
            raise error
        if len(self._ended) < self._count:
            raise StoreBroken("a worker died in the middle of a transfer")
