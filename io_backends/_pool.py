"""BufferPool: leases of block-aligned memory for direct reads, recycled so that no page is faulted in twice.

Guarantees:

1. A lease ends when its `view` dies, whoever held it last (a tensor's storage, a ticket). The finaliser only appends
   to a deque, so it may run on any thread at any bytecode; the space is reused by the next `lease`.
2. Leases never overlap. Each owns the whole aligned blocks around its bytes.
3. Memory is shared anonymous mapping: a fork neither copies it nor tears a read in flight.

First fit over a few segments keeps sizes from having pools of their own: a step's restored tensors, of whatever
sizes, reuse the same compact range.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque

from ._extents import Extents, align_up
from ._store import Buffer

# Large enough that a step needs few segments, small enough that a small model's pool stays small. Pages are touched
# only when used, so an empty part of a segment costs address space, not memory.
SEGMENT_BYTES = 64 << 20


class _Segment:
    def __init__(self, nbytes: int, alignment: int) -> None:
        # NORESERVE: address space only; what is never touched is never charged.
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self.memory = memoryview(mmap.mmap(-1, nbytes, flags=flags))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.extents = Extents(alignment, nbytes)
        self.used_since_trim = True


class _End(weakref.ref):  # type: ignore[type-arg]  # weakref.ref's type argument adds nothing to a private slot class
    __slots__ = ("length", "offset", "segment")
    segment: _Segment
    offset: int
    length: int


class BufferPool:
    """Leases of memory whose address modulo `alignment` the caller chooses. Thread-safe."""

    def __init__(self, alignment: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.alignment = alignment
        self._segment_bytes = align_up(segment_bytes, mmap.PAGESIZE)
        self._segments: list[_Segment] = []
        self._ended: deque[_End] = deque()
        self._live: dict[int, _End] = {}  # keeps the weak references themselves alive
        self._lock = threading.Lock()

    def lease(self, nbytes: int, skew: int = 0) -> tuple[memoryview, Buffer]:
        """A writable view of `nbytes` bytes with `address % alignment == skew`, and the padded buffer over it."""
        length = align_up(skew + nbytes, self.alignment)
        with self._lock:
            self._reclaim()
            segment, offset = self._place(length)
            segment.used_since_trim = True
            start = offset + skew
            view = segment.memory[start : start + nbytes]
            end = _End(view, self._ended.append)
            end.segment, end.offset, end.length = segment, offset, length
            self._live[id(end)] = end
        return view, Buffer(segment.address + start, nbytes, view, padded=True)

    def trim(self) -> None:
        """Give back segments that no lease has used since the last call (call it once a step)."""
        with self._lock:
            self._reclaim()
            self._segments = [s for s in self._segments if s.used_since_trim or s.extents.used_bytes]
            for segment in self._segments:
                segment.used_since_trim = False

    @property
    def leased_bytes(self) -> int:
        """Bytes out on lease, padding included."""
        with self._lock:
            self._reclaim()
            return sum(segment.extents.used_bytes for segment in self._segments)

    def _reclaim(self) -> None:
        while self._ended:
            end = self._ended.popleft()
            if self._live.pop(id(end), None) is not None:
                end.segment.extents.free(end.offset, end.length)

    def _place(self, length: int) -> tuple[_Segment, int]:
        for segment in self._segments:
            offset = segment.extents.allocate(length)
            if offset is not None:
                return segment, offset
        segment = _Segment(max(self._segment_bytes, align_up(length, mmap.PAGESIZE)), self.alignment)
        self._segments.append(segment)
        offset = segment.extents.allocate(length)
        assert offset is not None
        return segment, offset
