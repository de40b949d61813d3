"""A clock for tests of plans: its time follows from what the program does, on any machine and beside anything.

Each operator that autograd records takes as long, and twice as long in backward, which is as far as the node that
it has come to. What moves takes a link of `RATE` bytes/s, or of a limit that is set below it, and no CPU seconds; no
step waits for it. All of these are powers of two, so their sums are exact in whatever order they are added up.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch

from io_backends import Ticket
from tba._plan import clock
from tba._plan.clock import Carried, Clock

OPERATOR_S = 2.0**-12
SHORT_S = 2.0**-16  # of operators on a few KiB
RATE = 1 << 30  # that of a link which has not carried enough to tell

_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
_current_node: Callable[[], Any] = torch._C._current_autograd_node


class Counted(Clock):
    """Counts autograd's nodes: those it makes, where a forward or a second run goes on, and those it has gone through.

    Args:
        operator_s: that an operator takes, a power of two.
        rate: of the link, in bytes/s, a power of two.
    """

    def __init__(self, operator_s: float = OPERATOR_S, rate: int = RATE) -> None:
        self._operator_s = operator_s
        self._rate = rate
        self._nodes = 0
        self._moved_s = 0.0
        self._local = threading.local()  # autograd numbers nodes by thread

    def now_s(self) -> float:
        made, local = _sequence_nr(), self._local
        node = _current_node()
        at = made if node is None else node._sequence_nr()
        if at <= made:  # accumulating nodes have a number above all others
            before, last_at = getattr(local, "seen", (made, made))
            self._nodes += made - before + (2 * max(0, last_at - at) if node is not None else 0)
            local.seen = made, at
        return self._nodes * self._operator_s

    def waited_s(self, seconds: float) -> float:
        return 0.0

    def worked_s(self, seconds: float) -> float:
        return 0.0

    def carried(self, ticket: Ticket) -> Carried:
        begun_s = self._moved_s
        self._moved_s += ticket.moved_bytes / self._rate
        return Carried(begun_s, self._moved_s, 0.0)


class Erratic(Counted):
    """Runs up to ten times too fast or too slow, now and then, and its link up to thirty times too slow."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._numbers = random.Random(seed)
        self._last_s = self._shown_s = 0.0
        self._factor = self._slowness = 1.0

    def now_s(self) -> float:
        now_s = super().now_s()
        if self._numbers.random() < 0.02:
            self._factor = self._numbers.choice((0.1, 0.3, 1.0, 3.0, 10.0))
        self._shown_s += (now_s - self._last_s) * self._factor
        self._last_s = now_s
        return self._shown_s

    def carried(self, ticket: Ticket) -> Carried:
        begun_s, ended_s, _ = super().carried(ticket)
        if self._numbers.random() < 0.05:
            self._slowness = self._numbers.choice((1.0, 10.0, 30.0))
        took_s = (ended_s - begun_s) * self._slowness
        self._moved_s = begun_s + took_s
        return Carried(begun_s, self._moved_s, 0.0)


def put(made: Clock) -> None:
    """Have engines that are made from here on, and those there are, go by this clock."""
    clock.current = made
