"""Known: the records of one storage, so that a further save of its bytes joins one of them.

A loop over the slices of one storage makes thousands of records of it, so a save finds the one that has its bytes by
bisection. Identity is the tensor whose version counter a record shares, its version, and the engine that asks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque

from torch import Tensor

from .record import Record, Remains

# (id of the tensor, its version, id of the engine's deque of remains)
_Key = tuple[int, int, int]
# (begin, end, record), in bytes of the storage.
_Range = tuple[int, int, Remains]

_LEAST_SWEEP = 64


class Known:
    """Ranges of a storage that records have, none within another: sorted by where they begin, they end in order too.

    Records are held weakly. What has died is dropped when a search meets it, and all of it once in a while.
    """

    __slots__ = ("_count", "_ranges", "_sweep_at")

    def __init__(self) -> None:
        self._ranges: dict[_Key, list[_Range]] = {}
        self._count = 0
        self._sweep_at = _LEAST_SWEEP

    def find(self, root: Tensor, begin: int, end: int, owner: deque[Remains]) -> Record | None:
        """A record of `owner` that has bytes `[begin, end)` of `root`, as they are now; None if there is none."""
        ranges = self._ranges.get((id(root), root._version, id(owner)))
        if ranges is None:
            return None
        index = bisect_right(ranges, (begin, math.inf))
        while index:
            index -= 1
            _, last, reference = ranges[index]
            if last < end:
                return None
            record = reference()
            if record is not None and record.may_be_joined(root):
                return record
            del ranges[index]
        return None

    def add(self, record: Record) -> None:
        """Note a new record. It takes the place of those within its range, and of those that could not be joined."""
        begin, end = record.begin, record.end
        ranges = self._ranges.setdefault((id(record.root()), record.saved_version, id(record.remains)), [])
        first = stop = bisect_left(ranges, (begin,))
        while stop < len(ranges) and (ranges[stop][0] == begin or ranges[stop][1] <= end):
            stop += 1
        while first and ranges[first - 1][1] >= end:
            first -= 1
        ranges[first:stop] = [(begin, end, record.ref)]
        self._count += 1
        if self._count >= self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        """Drop what has died: a storage may outlive any number of records and versions."""
        everything = list(self._ranges.items())  # another engine, with a lock of its own, may add to it
        alive = {key: [entry for entry in ranges if entry[2]() is not None] for key, ranges in everything}
        self._ranges = {key: ranges for key, ranges in alive.items() if ranges}
        self._count = sum(map(len, self._ranges.values()))
        self._sweep_at = _LEAST_SWEEP + 2 * self._count
