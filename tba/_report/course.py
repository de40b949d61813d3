"""Course of a recorded region: memory over time, and when transfers and waits were in progress. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .._stats import TraceEvent

Points = list[tuple[float, int]]
Spans = list[tuple[float, float]]

_COLUMNS = 900  # the maximum number of points that show a course


@dataclass(frozen=True)
class Course:
    """What happened when, in seconds from the first event.

    Attributes:
        seconds: until the end of the last event.
        held: bytes that saved tensors held in memory from each time on.
        plain: what they would hold if none was moved, compressed or recomputed.
        spans: when at least one event of a kind was in progress, by kind.
        nbytes: the bytes of all events of a kind, by kind.
    """

    seconds: float
    held: Points
    plain: Points
    spans: dict[str, Spans]
    nbytes: dict[str, int]

    @property
    def most_held_bytes(self) -> int:
        """Maximum bytes held at once."""
        return max((nbytes for _, nbytes in self.held), default=0)

    @property
    def most_plain_bytes(self) -> int:
        """Maximum bytes at once, if none was moved, compressed or recomputed."""
        return max((nbytes for _, nbytes in self.plain), default=0)


def course(events: Sequence[TraceEvent], kinds: Iterable[str]) -> Course | None:
    """Follow the events of a region; None if no byte is in them. Spans are only made for these kinds."""
    if not any(event.nbytes for event in events):
        return None
    begun_s = min(event.start_s for event in events)
    seconds = max(event.end_s for event in events) - begun_s
    held: Points = [(0.0, 0)]
    plain: Points = [(0.0, 0)]
    for event in sorted(events, key=lambda event: event.end_s):
        at_s = event.end_s - begun_s
        if event.kind == "held":
            held.append((at_s, event.nbytes))
        elif event.kind == "plain":
            plain.append((at_s, event.nbytes))
    of_kind = {kind: [event for event in events if event.kind == kind] for kind in kinds}
    return Course(
        seconds=seconds,
        held=thinned(held, seconds),
        plain=thinned(plain, seconds),
        spans={kind: _joined(found, begun_s, seconds / _COLUMNS) for kind, found in of_kind.items()},
        nbytes={kind: sum(event.nbytes for event in found) for kind, found in of_kind.items()},
    )


def thinned(points: Points, seconds: float) -> Points:
    """Keep the highest point in each column of the picture, and the last of all."""
    highest: dict[int, tuple[float, int]] = {}
    for at_s, nbytes in points:
        column = int(_COLUMNS * at_s / seconds) if seconds else 0
        if column not in highest or nbytes >= highest[column][1]:
            highest[column] = at_s, nbytes
    return [*highest.values(), points[-1]]


def _joined(events: Iterable[TraceEvent], begun_s: float, gap_s: float) -> Spans:
    """Join events that overlap or are less than `gap_s` apart."""
    spans: Spans = []
    for event in sorted(events, key=lambda event: event.start_s):
        start_s, end_s = event.start_s - begun_s, event.end_s - begun_s
        if spans and start_s <= spans[-1][1] + gap_s:
            spans[-1] = spans[-1][0], max(spans[-1][1], end_s)
        else:
            spans.append((start_s, end_s))
    return spans
