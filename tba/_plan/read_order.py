"""Read order: in which order backward asks, learned from the last time. Pure: numbers in, numbers out.

Records are numbered in pack order. A *walk* is one call of backward. What it asked for is remembered as distances from
the first number it asked for, under the shape of that first record; a later walk that begins alike is predicted to go
on alike, wherever in the sequence its graph was packed. Micro-batches that are alike, in whatever order pipeline
schedules interleave them, therefore share one order, and no boundary between graphs has to be known.

Before an order is known: reverse pack order, and so where a walk goes on past the end of the one that was learned, as
with a recurrent network whose sequences differ in length. Where backward departs from the prediction, the walk takes it
up again at the record really asked for; what cannot be found is read when it is asked for, later, not wrong.
"""

from __future__ import annotations

from collections.abc import Hashable

_MAX_ORDERS = 64  # kinds of graph remembered; the least recently learned goes first


class Walk:
    """One backward: what it asked for so far and what it is expected to ask for next."""

    def __init__(self, first: int, kind: Hashable, expected: list[int] | None) -> None:
        self.kind = kind
        self.distances: list[int] = []
        self._first = first
        self._expected = expected
        self._places = {distance: place for place, distance in enumerate(expected)} if expected else {}
        self._lowest = min(self._places, default=0)  # distance of what was packed first
        self._next_place = 0  # in `expected`: the first neither asked for, nor passed, nor taken
        self._next_down = first  # the same where reverse pack order is all there is to go by
        self._asked: set[int] = set()

    def ask(self, number: int) -> bool:
        """Note that backward asks for `number`; False if it did before, as only the first time tells about order."""
        if number in self._asked:
            return False
        self._asked.add(number)
        distance = number - self._first
        self.distances.append(distance)
        self._next_down = min(self._next_down, number - 1)
        if self._expected is not None and self._next_place >= len(self._expected) and distance < self._lowest:
            # Only now: at the end of an order nothing tells whether what lies below belongs to this graph.
            self._expected = None
        self._next_place = max(self._next_place, self._places.get(distance, -1) + 1)
        return True

    def peek(self, lowest: int) -> int | None:
        """Find the number expected next, neither asked for nor taken; None past the order's end or below `lowest`."""
        if self._expected is None:
            while self._next_down in self._asked:
                self._next_down -= 1
            return self._next_down if self._next_down >= lowest else None
        while self._next_place < len(self._expected):
            number = self._first + self._expected[self._next_place]
            if number not in self._asked:
                return number
            self._next_place += 1
        return None

    def take(self) -> None:
        """Go on to the next: what `peek` gave is on its way, or gone."""
        if self._expected is None:
            self._next_down -= 1
        else:
            self._next_place += 1


class Orders:
    """Orders of reading learned from walks."""

    def __init__(self) -> None:
        self._learned: dict[Hashable, list[int]] = {}

    def begin(self, first: int, kind: Hashable) -> Walk:
        """Begin a walk that asks first for the record numbered `first`, whose shape is `kind`."""
        return Walk(first, kind, self._learned.get(kind))

    def learn(self, walk: Walk) -> None:
        """Learn from a walk that has ended: the next of its kind is expected to be alike."""
        if not walk.distances:
            return
        self._learned.pop(walk.kind, None)
        self._learned[walk.kind] = walk.distances
        if len(self._learned) > _MAX_ORDERS:
            del self._learned[next(iter(self._learned))]
