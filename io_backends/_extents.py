"""Extents: which ranges of a file or an arena are in use. Pure arithmetic, no I/O.

First fit from the lowest address, with neighbors merged when freed. Under a periodic load (a training step) the used
range stays compact, and its end stops growing after the first period. Not thread-safe: the owner holds the lock.

Guarantee: an exception between any two bytecodes (Ctrl-C) leaves an operation done or not done. The whole state is one
list, and each operation changes it by one slice assignment.
"""

from __future__ import annotations

from bisect import bisect_left

# For files without a capacity: more than any file system holds.
_ENDLESS = 1 << 62


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment


class Extents:
    """Allocator of ranges `[offset, offset + length)`; all offsets and lengths are multiples of `alignment`.

    Args:
        alignment: bytes.
        capacity: bytes, or None for a file that may grow without limit.
    """

    def __init__(self, alignment: int, capacity: int | None = None) -> None:
        if alignment <= 0:
            raise ValueError(f"alignment must be positive, got {alignment}")
        self.alignment = alignment
        self.capacity = capacity
        self._limit = (_ENDLESS if capacity is None else capacity) // alignment * alignment
        # Free ranges as (begin, stop), sorted, never adjacent.
        self._free = [(0, self._limit)] if self._limit else []

    def grow(self, capacity: int) -> None:
        """Raise the capacity. Unlike the others, this is more than one assignment: for threads without interrupts."""
        before, self._limit = self._limit, capacity // self.alignment * self.alignment
        self.capacity = capacity
        if self._free and self._free[-1][1] == before:
            self._free[-1] = (self._free[-1][0], self._limit)
        elif before < self._limit:
            self._free.append((before, self._limit))

    @property
    def used_bytes(self) -> int:
        return self._limit - sum([stop - begin for begin, stop in self._free])

    def allocate(self, length: int) -> int | None:
        """Offset of a free range of at least `length` bytes (rounded up), or None if there is no room."""
        if length <= 0:
            raise ValueError(f"length must be positive, got {length}")
        if length % self.alignment:
            length = align_up(length, self.alignment)
        for index, (begin, stop) in enumerate(self._free):
            if stop - begin >= length:
                self._free[index : index + 1] = [(begin + length, stop)] if stop - begin > length else []
                return begin
        return None

    def free_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """List the free parts of [start, stop) as (offset, length), ascending. Both are multiples of the alignment."""
        ranges = [(max(begin, start), min(end, stop)) for begin, end in self._free]
        return [(begin, end - begin) for begin, end in ranges if begin < end]

    def take(self, offset: int, length: int) -> None:
        """Mark a range as used. Raises ValueError if any of it is in use or beyond `capacity`."""
        stop = offset + length
        if length <= 0 or length % self.alignment or self.free_ranges(offset, stop) != [(offset, length)]:
            raise ValueError(f"range [{offset}, {stop}) is not free")
        index = bisect_left(self._free, (offset + 1, 0)) - 1
        begin, end = self._free[index]
        left = [(begin, offset), (stop, end)]
        self._free[index : index + 1] = [(first, last) for first, last in left if first < last]

    def free(self, offset: int, length: int) -> None:
        """Free a range. Raises ValueError unless all of it is in use: a double free would corrupt data."""
        if length <= 0:
            raise ValueError(f"length must be positive, got {length}")
        if length % self.alignment:
            length = align_up(length, self.alignment)
        free, stop = self._free, offset + length
        index = bisect_left(free, (offset, 0))
        before = free[index - 1][1] if index else 0
        after = free[index][0] if index < len(free) else self._limit
        if offset < before or stop > after or offset % self.alignment:
            raise ValueError(f"range [{offset}, {stop}) is not in use")
        first, last = index, index
        begin, end = offset, stop
        if index and before == offset:
            first, begin = index - 1, free[index - 1][0]
        if index < len(free) and after == stop:
            last, end = index + 1, free[index][1]
        free[first:last] = [(begin, end)]
