"""BufferPool: leases of block-aligned memory for direct reads, recycled so that no page is faulted in twice.

Guarantees:

1. A lease ends when its `view` dies, whoever held it last (a tensor's storage, a ticket). The finaliser only appends
   to a deque, so it may run on any thread at any bytecode; the space is reused by the next `lease`. It is this very
   object that counts: `torch.frombuffer` holds it, but slices of it and numpy arrays over it do not.
2. Leases never overlap. Each owns the whole aligned blocks around its bytes.
3. The memory is private: a forked child has a copy of its own. Whoever reads into leases holds transfers back around
   a fork (`_posix` does), as direct I/O into private memory wants (open(2), NOTES).

Huge pages, where the system gives them: pinning a transfer's memory page by page is most of what direct I/O costs the
CPU (measured: 0.08 CPU seconds per GiB read with 4 KiB pages, 0.025 with 2 MiB). Shared anonymous memory, which would
need no care at a fork, gets none as Linux comes (`shmem_enabled` is `never`).

First fit over a few segments keeps sizes from having pools of their own: a step's restored tensors, of whatever
sizes, reuse the same compact range.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from contextlib import suppress

from ._extents import Extents, align_up
from ._store import Buffer

# Large enough that a step needs few segments, small enough that a small model's pool stays small. Pages are touched
# only when used, so an empty part of a segment costs address space, not memory.
SEGMENT_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20


class _Segment:
    def __init__(self, nbytes: int, alignment: int) -> None:
        # NORESERVE: address space only; what is never touched is never charged.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = memoryview(mapping)
        start = -_address_of(memory) % _HUGE_PAGE_BYTES
        self.memory = memory[start : start + nbytes]
        self.address = _address_of(self.memory)
        self.extents = Extents(alignment, nbytes)
        self.used_since_trim = True


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


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
