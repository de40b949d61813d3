"""Arithmetic over the events of a step: busy time, hidden time, and lanes to draw in.

Pure functions over `(kind, start_s, end_s, nbytes, label)`; kinds are "write", "read", "wait" and "forwarded".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Event = tuple[str, float, float, int, str]
Span = tuple[str, str, float, float]

TRANSFERS = ("write", "read")


def of_kind(events: Iterable[Sequence[Any]], *kinds: str) -> list[Event]:
    """Select the events of these kinds, ordered by start."""
    found = [(kind, start, end, nbytes, label) for kind, start, end, nbytes, label in events if kind in kinds]
    return sorted(found, key=lambda event: event[1])


def busy_s(events: Iterable[Event]) -> float:
    """Count the seconds in which at least one of the events was under way."""
    total = 0.0
    until = float("-inf")
    for _, start, end, _, _ in sorted(events, key=lambda event: event[1]):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def hidden_share(io_busy_s: float, waited_s: float) -> float:
    """Share of I/O time hidden behind compute: 1 where nothing waited."""
    if io_busy_s <= 0.0:
        return 1.0
    return max(0.0, 1.0 - waited_s / io_busy_s)


def lanes(events: Sequence[Event]) -> list[int]:
    """Assign events, sorted by start, to as few lanes as possible, so that no two in a lane overlap."""
    ends: list[float] = []  # of each lane's last event
    chosen = []
    for _, start, end, _, _ in events:
        lane = next((lane for lane, until in enumerate(ends) if until <= start), len(ends))
        ends[lane : lane + 1] = [end]
        chosen.append(lane)
    return chosen


def away_bytes(events: Iterable[Sequence[Any]], end_s: float) -> tuple[list[float], list[int]]:
    """Bytes in the tier and not in memory, as a step function: up when a write ends, down when a read does."""
    changes = [(end, nbytes if kind == "write" else -nbytes) for kind, _, end, nbytes, _ in of_kind(events, *TRANSFERS)]
    at_s, sizes = [0.0], [0]
    for at, change in sorted(changes):
        at_s.append(at)
        sizes.append(max(0, sizes[-1] + change))
    return [*at_s, end_s], [*sizes, sizes[-1]]


def phase_s(spans: Iterable[Sequence[Any]], phase: str) -> float:
    """Count the seconds spent in "forward", "backward" or "optimizer"."""
    return sum(end - start for kind, _, start, end in spans if kind == phase)
