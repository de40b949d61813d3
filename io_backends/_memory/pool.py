"""BufferPool: leases of block-aligned memory for direct reads, recycled so that few pages are faulted in twice.

Guarantees:

1. A lease ends when its `view` dies, whoever held it last (a tensor's storage, a ticket). The finalizer only appends to
   a deque, so it may run on any thread at any bytecode; the next `lease` reuses the space. Only this object counts:
   `torch.frombuffer` holds it, but slices of it and NumPy arrays over it do not.
2. Leases never overlap. Each owns the aligned blocks around its bytes.
3. The memory is private: a forked child has its own copy. Transfers into leases wait around a fork
   (`_workers.workers`), as direct I/O into private memory requires (open(2), NOTES).
4. With a budget, the segments together never exceed it. If a lease finds no room although all others have ended,
   segments without leases are dropped to make room.
5. A lease outlives the pool and its `close`: a segment is unmapped when its last lease ends.
6. A device may still copy to or from a lease after its last user has dropped it. `retain` keeps it until the copy is
   over.
7. Fragmentation costs no memory. A lease that touches new pages gives back as many that no lease covers, so no more
   pages are in memory than leases have covered at one time. In units of huge pages; not if memory is locked, nor in an
   arena, whose memory is pinned.
8. With `idle_bytes`, at most that much stays in memory for future leases, as of the last `lease` or `trim`. A larger
   lease has its own memory, which is unmapped as soon as the lease ends.
9. An interrupt (Ctrl-C) at any bytecode costs at most one range, which `trim` recovers.

Where threads meet:

- The end of a lease and `lease`. The finalizer appends the weak reference, which knows the range; `lease` frees, under
  the lock, what was appended so far. So a range is never free before its view is dead. `_live` keeps each reference
  until its range is free, so no other has its `id`.
- `retain` and `_let_go`. The first only appends; the second removes the item that it found ready. If two threads find
  the same item, the second finds nothing to remove.
- `close` and leases. `close` drops the pool's references to segments; each view still holds its mapping, and nobody
  looks at the ends of later leases.

Huge pages are used if available: pinning a transfer's memory page by page is most of direct I/O's CPU cost (measured:
0.08 CPU seconds per GiB read with 4 KiB pages, 0.025 with 2 MiB). Shared anonymous memory would need no care at a fork,
but gets no huge pages under Linux's default (`shmem_enabled` is `never`).

First fit over a few segments needs no pools per size: a step's restored tensors reuse one compact range. If a step's
first tensors come in another order, as after a pause of the disk, gaps may be too small for the largest until the step
ends (measured: 24 MiB for 16).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from .._buffer import Buffer
from .._errors import StoreClosed, StoreFull
from .._extents import Extents, align_up
from .huge_pages import Pages

# A step needs few segments of this size, and a small model's pool stays small. Unused pages cost address space only.
SEGMENT_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20


class Mapping(mmap.mmap):
    """Private anonymous memory, unmapped when its last view dies, after a call of `before_unmap`."""

    before_unmap: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.before_unmap is not None:
            self.before_unmap()


def map_memory(nbytes: int) -> tuple[Mapping, memoryview]:
    """Map memory; also return the `nbytes` of it that begin at a huge page. Raises OSError if the system has none."""
    # NORESERVE: untouched memory is never charged.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    mapping = Mapping(-1, nbytes + _HUGE_PAGE_BYTES, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(mapping)
    start = -address_of(memory) % _HUGE_PAGE_BYTES
    return mapping, memory[start : start + nbytes]


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class _Segment:
    def __init__(self, mapping: Mapping | None, memory: memoryview, alignment: int) -> None:
        self.mapping = mapping  # None: somebody else allocated the memory, which lives as long as its views
        self.memory = memory
        self.address = address_of(memory)
        self.extents = Extents(alignment, memory.nbytes)
        self.pages = Pages(_HUGE_PAGE_BYTES, memory.nbytes)
        self.idle_trims = 0  # calls of `trim` since a lease last used it
        self.least_refused = memory.nbytes + 1  # leases of this size or larger find no room

    @property
    def is_pinned(self) -> bool:
        return self.mapping is not None and self.mapping.before_unmap is not None

    def allocate(self, length: int) -> int | None:
        """Offset of a free range, or None. Asking a full segment, of hundreds, costs one comparison."""
        if length >= self.least_refused:
            return None
        offset = self.extents.allocate(length)
        if offset is None:
            self.least_refused = length
        return offset

    def free(self, offset: int, length: int) -> None:
        self.least_refused = self.memory.nbytes + 1  # first: an interrupt in between costs one needless search
        self.extents.free(offset, length)

    def let_go(self, most: int) -> int:
        """Give up to `most` pages that no lease covers back to the system; return how many."""
        if self.mapping is None:
            return 0
        begin = self.address - address_of(memoryview(self.mapping))
        pages = self.pages.idle(self.extents.free_ranges(0, self.memory.nbytes), most)
        for offset in pages:
            with suppress(OSError):  # locked memory stays (mlockall)
                self.mapping.madvise(mmap.MADV_DONTNEED, begin + offset, self.pages.page_bytes)
            self.pages.gone(offset)
        return len(pages)

    def mend(self, leases: Iterable[_End]) -> None:
        """Recompute what is free: all but what these leases have."""
        self.least_refused = self.memory.nbytes + 1
        extents = Extents(self.extents.alignment, self.memory.nbytes)
        for end in leases:
            if end.segment is self:
                extents.take(end.offset, end.length)
        self.extents = extents


class _Retained:
    """What holds a lease, and whether its copy is over. Compared by identity."""

    __slots__ = ("owner", "ready")

    def __init__(self, owner: object, ready: Callable[[], bool]) -> None:
        self.owner = owner
        self.ready = ready


def _drop_first(queue: deque[_Retained]) -> bool:
    try:
        first = queue[0]
        if not first.ready():
            return False
        queue.remove(first)  # not `popleft`: another item may be first by now
    except (IndexError, ValueError):  # another thread was faster
        return False
    return True


class _End(weakref.ref):  # type: ignore[type-arg]  # weakref.ref's type argument adds nothing to a private slot class
    __slots__ = ("length", "offset", "segment")
    segment: _Segment | None  # None: the lease has memory of its own
    offset: int
    length: int


class BufferPool:
    """Leases of memory whose address modulo `alignment` the caller chooses. Thread-safe.

    Args:
        alignment: bytes.
        segment_bytes: how much to map at once, unless a lease needs more; rounded up to whole pages.
        budget_bytes: most that segments may take together, rounded down to whole pages; None for no limit.
        idle_bytes: most that may stay in memory for future leases; None for no limit.
        beside: pools that share the budget, this one among them; not two of them lease at once.
    """

    _gives_back = hasattr(mmap, "MADV_DONTNEED")
    _kept_trims = 1  # calls of `trim` that an unused segment survives

    def __init__(
        self,
        alignment: int,
        segment_bytes: int = SEGMENT_BYTES,
        *,
        budget_bytes: int | None = None,
        idle_bytes: int | None = None,
        beside: Iterable[BufferPool] = (),
    ) -> None:
        if alignment < 1 or _HUGE_PAGE_BYTES % alignment:
            raise ValueError(f"an alignment must divide a huge page of {_HUGE_PAGE_BYTES} bytes, got {alignment}")
        if budget_bytes is not None and budget_bytes < mmap.PAGESIZE:
            raise ValueError(f"a budget must hold at least one page of {mmap.PAGESIZE} bytes, got {budget_bytes}")
        self.alignment = alignment
        self.budget_bytes: int | None = None
        if budget_bytes is not None:
            self.resize(budget_bytes)
        self._idle_bytes = None if idle_bytes is None else max(idle_bytes, _HUGE_PAGE_BYTES)
        self._segment_bytes = align_up(segment_bytes, mmap.PAGESIZE)
        self._beside = beside
        self._segments: list[_Segment] = []
        self._ended: deque[_End] = deque()
        self._live: dict[int, _End] = {}  # keeps the weak references themselves alive
        self._retained: dict[object, deque[_Retained]] = {}  # by the queue whose copies use them
        self._lock = threading.Lock()
        self._closed = False

    def lease(self, nbytes: int, skew: int = 0) -> tuple[memoryview, Buffer]:
        """Lease `nbytes` with `address % alignment == skew`: a writable view, and the padded buffer over it.

        Raises:
            StoreFull: the budget has no room for it.
            StoreClosed: after `close`.
        """
        if not 0 <= skew < self.alignment:
            raise ValueError(f"a skew must lie within the alignment of {self.alignment} bytes, got {skew}")
        length = align_up(max(1, skew + nbytes), self.alignment)
        if self._retained:
            self._let_go()
        with self._lock:
            if self._closed:
                raise StoreClosed("the pool is closed; make a new one")
            ended = bool(self._ended)
            if ended:
                self._reclaim()
            segment, offset = (None, 0) if self._is_alone(length) else self._place(length)
            if segment is None:
                _, memory = self._map(align_up(length, mmap.PAGESIZE))
                address = address_of(memory)
            else:
                memory, address = segment.memory, segment.address
                self._touch(segment, offset, length)
            start = offset + skew
            view = memory[start : start + nbytes]
            end = _End(view, self._ended.append)
            end.segment, end.offset, end.length = segment, offset, length
            self._live[id(end)] = end
            if ended:
                self._limit_idle()
        # `Buffer(...)` is a Python function, and every read makes one.
        return view, tuple.__new__(Buffer, (address + start, nbytes, view, True, False, False))

    def retain(self, owner: object, ready: Callable[[], bool], queue: object = None) -> None:
        """Keep what holds a lease until `ready()`, a device's answer that its copy is over.

        The next `lease` or `trim` asks, on its thread, after all earlier items of the same `queue` (a stream, whose
        copies run in order) are over. May be called on any thread at any bytecode.
        """
        self._retained.setdefault(queue, deque()).append(_Retained(owner, ready))

    @property
    def retains(self) -> bool:
        """Whether copies of a device still use leases that nobody else has: their end makes room."""
        return any(any(pool._retained.values()) for pool in self._beside or (self,))

    def trim(self, *, all_idle: bool = False) -> None:
        """Once per step: give back segments that no lease has used for some calls, or all unused ones if `all_idle`."""
        self._let_go()
        with self._lock:
            self._reclaim()
            # An interrupt may have lost the end of a lease, or a range that no lease got: rebuild from live leases.
            self._live = {key: end for key, end in self._live.items() if end() is not None}
            for segment in self._segments:
                segment.mend(self._live.values())
            self._limit_idle()
            too_many = self.budget_bytes is not None and self.mapped_bytes > self.budget_bytes
            kept_trims = 0 if all_idle or too_many else self._kept_trims
            self._segments = [s for s in self._segments if s.idle_trims < kept_trims or s.extents.used_bytes]
            for segment in self._segments:
                segment.idle_trims += 1

    def close(self) -> None:
        """Unmap every segment, leased ones when their last lease ends. Idempotent; `lease` fails afterwards."""
        with self._lock:
            self._closed = True
            self._segments = []
            self._live.clear()  # the ends of leases no longer matter, and they hold the segments
            self._ended.clear()

    @property
    def leased_bytes(self) -> int:
        """Leased bytes, padding included; 0 once closed."""
        with self._lock:
            self._reclaim()
            return sum(end.length for end in self._live.values())

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all segments and of leases with memory of their own."""
        alone = sum(end.length for end in self._live.copy().values() if end.segment is None and end() is not None)
        return alone + sum(segment.memory.nbytes for segment in self._segments)

    def _let_go(self) -> None:
        """Drop retained leases whose copy is over. Call without the lock: `ready` and finalizers are foreign code."""
        for queue in list(self._retained.values()):
            while queue and _drop_first(queue):
                pass

    def _is_alone(self, length: int) -> bool:
        """Whether a lease gets memory of its own."""
        return self._idle_bytes is not None and length > self._idle_bytes

    def _map(self, nbytes: int) -> tuple[Mapping | None, memoryview]:
        """Map a segment of `nbytes`, a whole number of pages."""
        return map_memory(nbytes)

    def _reclaim(self) -> None:
        while self._ended:
            end = self._ended.popleft()
            if self._live.pop(id(end), None) is not None and end.segment is not None:
                end.segment.free(end.offset, end.length)

    def _place(self, length: int) -> tuple[_Segment, int]:
        # A segment made for an unusually large lease serves only such leases, or it would never become unused ...
        usual = length <= self._segment_bytes
        found = self._find(length, self._segment_bytes if usual else None)
        if found is not None:
            return found
        least = align_up(length, mmap.PAGESIZE)
        try:
            room = self._room_for(least)
            try:
                mapping, memory = self._map(room)
            except OSError as error:  # no room for a whole segment, but perhaps for the lease
                if error.errno != errno.ENOMEM or room == least:
                    raise
                mapping, memory = self._map(least)
        except (StoreFull, OSError):
            found = self._find(length)  # ... unless there is no room elsewhere
            if found is None:
                raise
            return found
        segment = _Segment(mapping, memory, self.alignment)
        self._segments.append(segment)
        offset = segment.allocate(length)
        assert offset is not None
        return segment, offset

    def _find(self, length: int, most_bytes: int | None = None) -> tuple[_Segment, int] | None:
        """Find room in a segment of at most `most_bytes`."""
        for segment in self._segments:
            if length < segment.least_refused and (most_bytes is None or segment.memory.nbytes <= most_bytes):
                offset = segment.allocate(length)
                if offset is not None:
                    return segment, offset
        return None

    def _touch(self, segment: _Segment, offset: int, length: int) -> None:
        """Note that a lease will use a range; free as many unused pages as that touches for the first time."""
        segment.idle_trims = 0
        new_pages = segment.pages.touch(offset, length)
        if new_pages and self._gives_back:
            self._give_back(new_pages)

    def _limit_idle(self) -> None:
        if self._idle_bytes is not None:
            touched = sum([len(segment.pages.touched) for segment in self._segments]) * _HUGE_PAGE_BYTES
            leased = sum([end.length for end in self._live.values() if end.segment is not None])
            if touched - leased > self._idle_bytes:
                self._give_back(-(-(touched - leased - self._idle_bytes) // _HUGE_PAGE_BYTES))

    def resize(self, budget_bytes: int) -> None:
        """Change the budget. Segments beyond it stay until no lease is in them; no more are mapped meanwhile."""
        self.budget_bytes = budget_bytes // mmap.PAGESIZE * mmap.PAGESIZE

    def _give_back(self, pages: int) -> None:
        """Give up to `pages` free pages back to the system."""
        for segment in reversed(self._segments):  # the first ones are reused first
            pages -= segment.let_go(pages)
            if not pages:
                return

    def _room_for(self, nbytes: int) -> int:
        """Size of a new segment for a lease of `nbytes`. Raises StoreFull."""
        wanted = max(self._segment_bytes, nbytes)
        if self.budget_bytes is None:
            return wanted
        used = sum(segment.memory.nbytes for segment in self._segments if segment.extents.used_bytes)
        others = [pool for pool in self._beside if pool is not self]
        left = self.budget_bytes - sum(pool.mapped_bytes for pool in others)
        if others and left - used < nbytes:
            for pool in others:
                pool.trim(all_idle=True)
            left = self.budget_bytes - sum(pool.mapped_bytes for pool in others)
        if left - used < nbytes:
            raise StoreFull(
                f"a lease of {nbytes} bytes does not fit: the pool's budget is {self.budget_bytes} bytes, "
                f"{self.budget_bytes - left + used} of them in segments on lease; raise the budget or drop leases"
            )
        if left - self.mapped_bytes < nbytes:  # all unused segments are too small: drop them
            self._segments = [segment for segment in self._segments if segment.extents.used_bytes]
        return min(wanted, left - self.mapped_bytes)
