"""Extents: which ranges of a file or of an arena are in use. Pure arithmetic, no I/O.

First fit from the lowest address, neighbours merged when freed: a periodic load (a training step) then occupies a
compact range whose end stops growing after the first period. Not thread-safe: the owner holds the lock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


class Extents:
    """Allocator of ranges `[offset, offset + length)` with all offsets and lengths multiples of `alignment`.

    Args:
        alignment: bytes.
        capacity: bytes, or None for a file that may grow without end.
    """

    def __init__(self, alignment: int, capacity: int | None = None) -> None:
        if alignment <= 0:
            raise ValueError(f"alignment must be positive, got {alignment}")
        self.alignment = alignment
        self.capacity = capacity
        self.end = 0  # nothing at or beyond this offset is, or has to be, in use
        self.high_water = 0  # where the highest allocation ended since its owner last set this
        self.used_bytes = 0
        self._offsets: list[int] = []  # free ranges below `end`, sorted, never touching one another
        self._lengths: list[int] = []

    def allocate(self, length: int) -> int | None:
        """Offset of a free range of at least `length` bytes (rounded up), or None when `capacity` has no room."""
        if length <= 0:
            raise ValueError(f"length must be positive, got {length}")
        if length % self.alignment:
            length = align_up(length, self.alignment)
        for index, free in enumerate(self._lengths):
            if free >= length:
                offset = self._offsets[index]
                if free == length:
                    del self._offsets[index], self._lengths[index]
                else:
                    self._offsets[index] += length
                    self._lengths[index] -= length
                break
        else:
            offset = self.end
            if self.capacity is not None and offset + length > self.capacity:
                return None
            self.end += length
        self.used_bytes += length
        if offset + length > self.high_water:
            self.high_water = offset + length
        return offset

    def free_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What is free in [start, stop), both multiples of the alignment: offsets and lengths, ascending."""
        ranges = [
            (max(offset, start), min(offset + length, stop) - max(offset, start))
            for offset, length in zip(
                [*self._offsets, self.end], [*self._lengths, max(0, stop - self.end)], strict=True
            )
        ]
        return [(offset, length) for offset, length in ranges if length > 0]

    def take(self, offset: int, length: int) -> None:
        """Take a given range out of what is free. Raises ValueError if any of it is in use or beyond `capacity`."""
        stop = offset + length
        fits = self.capacity is None or stop <= self.capacity
        if length <= 0 or length % self.alignment or not fits or self.free_ranges(offset, stop) != [(offset, length)]:
            raise ValueError(f"range [{offset}, {stop}) is not free")
        self.used_bytes += length
        if offset >= self.end:
            if offset > self.end:  # a gap, which touches no other: the last range before `end` is in use
                self._offsets.append(self.end)
                self._lengths.append(offset - self.end)
            self.end = stop
            return
        index = bisect_right(self._offsets, offset) - 1
        begin, free = self._offsets[index], self._lengths[index]
        left = [(begin, offset - begin), (stop, begin + free - stop)]
        self._offsets[index : index + 1] = [where for where, rest in left if rest]
        self._lengths[index : index + 1] = [rest for _, rest in left if rest]

    def free(self, offset: int, length: int) -> None:
        """Give a range back. Raises ValueError if it is not wholly in use: a double free would corrupt data."""
        if length <= 0:
            raise ValueError(f"length must be positive, got {length}")
        if length % self.alignment:
            length = align_up(length, self.alignment)
        index = bisect_left(self._offsets, offset)
        before = self._offsets[index - 1] + self._lengths[index - 1] if index else 0
        after = self._offsets[index] if index < len(self._offsets) else self.end
        if offset < before or offset + length > after or offset % self.alignment:
            raise ValueError(f"range [{offset}, {offset + length}) is not in use")
        self.used_bytes -= length
        joins_before = index > 0 and before == offset
        joins_after = index < len(self._offsets) and offset + length == after
        if joins_before and joins_after:
            self._lengths[index - 1] += length + self._lengths[index]
            del self._offsets[index], self._lengths[index]
        elif joins_before:
            self._lengths[index - 1] += length
        elif joins_after:
            self._offsets[index] = offset
            self._lengths[index] += length
        else:
            self._offsets.insert(index, offset)
            self._lengths.insert(index, length)
        if self._offsets and self._offsets[-1] + self._lengths[-1] == self.end:
            self.end = self._offsets.pop()
            self._lengths.pop()
