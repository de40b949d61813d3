"""Clock: the time that decisions are made from: of the computation, of waiting, and of transfers.

Whatever a plan or a derivation depends on that a machine's speed and load can change is asked of `current`, and of
nothing else. Tests put a clock of their own in its place, whose time follows from what a program does. Timelines and
counters, which decide nothing, show the machine's own time.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from io_backends import Ticket


class Carried(NamedTuple):
    """When a transfer ran, and the CPU seconds that it took its thread."""

    started_s: float
    ended_s: float
    cpu_s: float


class Clock:
    """The machine's clock, and what it has measured."""

    def now_s(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def waited_s(self, seconds: float) -> float:
        """Give the seconds that a wait of so many counts for."""
        return seconds

    def worked_s(self, seconds: float) -> float:
        """Give the seconds that the engine's own work of so many counts for."""
        return seconds

    def carried(self, ticket: Ticket) -> Carried:
        """Tell when a transfer that has ended ran, and what it took."""
        return Carried(ticket.started_s, ticket.ended_s, ticket.cpu_s)


current = Clock()
