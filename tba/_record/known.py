"""Known: the records of one storage, in which a save of bytes that a record has already finds that record.

A loop over the slices of one storage makes thousands of records, so the search is a bisection. Records are told apart
by the tensor whose version counter they share, its version, and the engine that has made them. Others with
the same bytes, which share its counter or not (Python cannot tell: `x.detach()`, `y.data = x`), find a record while
its bytes are still where they were.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from itertools import islice

from torch import Tensor, UntypedStorage

from io_backends import interrupts

from .._torch.weights import MARK
from .record import PENDING, Record, Remains

# (id of the tensor, its version, id of the engine's deque of remains)
_Key = tuple[int, int, int]
# (begin, end, record), in bytes of the storage.
_Range = tuple[int, int, Remains]

_LEAST_SWEEP = 64
_ALIKE = 4  # tensors and versions of which `find_alike` looks at records


class Known:
    """Ranges of a storage that records have, none within another: sorted by their begins, their ends are in order too.

    Records are held weakly. A dead one is dropped when a search meets it, and all of them once in a while.
    """

    __slots__ = ("_count", "_ranges", "_sweep_at")

    def __init__(self) -> None:
        self._ranges: dict[_Key, list[_Range]] = {}
        self._count = 0
        self._sweep_at = _LEAST_SWEEP

    def find(self, root: Tensor, begin: int, end: int, owner: deque[Remains]) -> Record | None:
        """Find a record of `owner` that has bytes `[begin, end)` of `root` as they are now; None if there is none."""
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

    def find_alike(self, begin: int, end: int, owner: deque[Remains], *, pending: bool) -> Record | None:
        """Find a record of `owner` of exactly the bytes `[begin, end)`, whichever tensor was saved with them.

        It must not have been copied: another tensor may have edited the memory since, by a counter of its own. Only
        what was saved last is looked at; if `pending`, only what no later save has passed on, however it will move.
        """
        try:
            last = list(islice(reversed(self._ranges.items()), _ALIKE))
        except RuntimeError as error:  # another engine, with a lock of its own, has just added a record
            interrupts.pass_on_from_call(error)
            return None
        for key, ranges in last:
            if key[2] != id(owner):
                continue
            index = bisect_left(ranges, (begin,))
            if index < len(ranges) and ranges[index][:2] == (begin, end):
                record = ranges[index][2]()
                if record is None or record.is_full or (pending and record.state is not PENDING):
                    continue
                if record.is_where_it_was():
                    return record
        return None

    @classmethod
    def add_to(cls, storage: UntypedStorage, record: Record) -> None:
        """Add a new record to those of a storage, which held no weight when it was looked at."""
        known: Known | None = getattr(storage, MARK, None)
        if type(known) is not cls:
            known = cls()
            setattr(storage, MARK, known)
        known.add(record)

    def add(self, record: Record) -> None:
        """Add a new record. It replaces records within its range, and records that could not be joined."""
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
        """Drop dead records: a storage may outlive any number of records and versions."""
        everything = self._ranges.copy().items()  # another engine, with a lock of its own, may add records
        alive = {key: [entry for entry in ranges if entry[2]() is not None] for key, ranges in everything}
        self._ranges = {key: ranges for key, ranges in alive.items() if ranges}
        self._count = sum(map(len, self._ranges.values()))
        self._sweep_at = _LEAST_SWEEP + 2 * self._count
