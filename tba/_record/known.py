"""Known: the records of one storage, searched when bytes are saved that may already have a record.

A loop over slices of one storage makes thousands of records, so the search is a bisection. The keys are the tensor
whose version counter a record shares, its version, and the engine that made it. That tensor counts by its weak
reference, of which there is one as long as a record holds it. Its own id is reused once it has died, so an id would
match depending on unrelated allocations. Other tensors with the same bytes, whether they share its counter or not
(Python cannot tell: `x.detach()`, `y.data = x`), find a record while its bytes have not moved.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from itertools import islice

from torch import Tensor, UntypedStorage

from io_backends import interrupts

from .._torch.weights import MARK
from .record import PENDING, Record, Remains

# (id of the weak reference to the tensor, its version, id of the engine's deque of remains)
_Key = tuple[int, int, int]
# (begin, end, record), in bytes of the storage.
_Range = tuple[int, int, Remains]

_LEAST_SWEEP = 64
_ALIKE = 4  # keys that `find_alike` checks


class Known:
    """Ranges of a storage that have records, none within another: sorted by begin, and so by end.

    Holds records weakly. A dead one is dropped when a search meets it, and all of them once in a while.
    """

    __slots__ = ("_count", "_ranges", "_sweep_at")

    def __init__(self) -> None:
        self._ranges: dict[_Key, list[_Range]] = {}
        self._count = 0
        self._sweep_at = _LEAST_SWEEP

    def find(self, root: Tensor, begin: int, end: int, owner: deque[Remains]) -> Record | None:
        """Find a record of `owner` with bytes `[begin, end)` of `root` at its current version; None without one."""
        ranges = self._ranges.get((id(weakref.ref(root)), root._version, id(owner)))
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
        """Find a record of `owner` with exactly the bytes `[begin, end)`, whichever tensor was saved with them.

        It must not have been copied: another tensor may have edited the memory since, under its own version counter.
        Only the last saved keys are checked; if `pending`, only records that no later save has passed on.
        """
        try:
            last = list(islice(reversed(self._ranges.items()), _ALIKE))
        except RuntimeError as error:  # another engine, with its own lock, has just added a record
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
        """Add a new record. It replaces records within its range and records that could not be joined."""
        begin, end = record.begin, record.end
        ranges = self._ranges.setdefault((id(record.root), record.saved_version, id(record.remains)), [])
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
        """Drop dead records: a storage may outlive many records and versions."""
        everything = self._ranges.copy().items()  # another engine, with its own lock, may add records
        alive = {key: [entry for entry in ranges if entry[2]() is not None] for key, ranges in everything}
        self._ranges = {key: ranges for key, ranges in alive.items() if ranges}
        self._count = sum(map(len, self._ranges.values()))
        self._sweep_at = _LEAST_SWEEP + 2 * self._count
