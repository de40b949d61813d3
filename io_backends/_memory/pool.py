"""BufferPool: leases of block-aligned memory for direct reads, recycled so that hardly a page is faulted in twice.

Guarantees:

1. A lease ends when its `view` dies, wherever it was held last (a tensor's storage, a ticket). The finaliser only
   appends to a deque, so it may run on any thread at any bytecode; the space is reused by the next `lease`. It is this
   very object that counts: `torch.frombuffer` holds it, but slices of it and numpy arrays over it do not.
2. Leases never overlap. Each owns the whole aligned blocks around its bytes.
3. The memory is private: a forked child has a copy of its own. Transfers into leases are held back around a fork
   (`_workers.workers`), as direct I/O into private memory wants (open(2), NOTES).
4. With a budget, the segments together never exceed it. A lease that finds no room though all others have ended gets
   it nevertheless: segments without leases make way.
5. A lease outlives the pool and its `close`: a segment is unmapped when the last of its leases has ended.
6. A device may still copy to or from a lease after its last user has let go. `retain` keeps it until the copy is over.
7. Leases that lie badly cost no memory: one that needs pages that are not in memory gives back as many that are free,
   so there are never more in memory than leases have covered at one time. In huge pages; not where memory is locked,
   nor in an arena, whose memory is meant to be pinned.
8. With `idle_bytes`, no more than that stays in memory for leases to come, as of the last `lease` or `trim`. A larger
   lease has memory of its own, which goes back to the system the moment the lease ends: it would be more than that.
9. An interrupt (Ctrl-C) at any bytecode costs at most one range, which `trim` finds again.

Where threads meet:

- The end of a lease against `lease`. The finaliser appends the weak reference itself, which knows the range; `lease`
  frees, under the lock, what was appended by then, and the rest is left to the next call. A range is thus never free
  before its view is dead. `_live` keeps each reference until its range is free, so no other can have its `id`.
- `retain` against `_let_go`. The first only appends; the second removes the very item that it found ready. Two threads
  may find one item ready: the second finds nothing to remove.
- `close` against leases. It drops the pool's references to segments and lets the lock go; each view still holds its
  mapping, and the appended ends of later leases are never looked at.

Huge pages, where the system gives them: pinning a transfer's memory page by page is most of what direct I/O costs the
CPU (measured: 0.08 CPU seconds per GiB read with 4 KiB pages, 0.025 with 2 MiB). Shared anonymous memory, which would
need no care at a fork, gets none as Linux comes (`shmem_enabled` is `never`).

First fit over a few segments keeps sizes from having pools of their own: a step's restored tensors, of whatever
sizes, reuse one compact range. It may differ from step to step: one whose first tensors come in another order, as
after a pause of the disk, may leave gaps that are too small for the largest until its end (measured: 24 MiB for 16).
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

# Large enough that a step needs few segments, small enough that a small model's pool stays small. Pages are touched
# only when used, so an empty part of a segment costs address space, not memory.
SEGMENT_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20


class Mapping(mmap.mmap):
    """Private anonymous memory, unmapped when the last view of it dies, after a call of `before_unmap`."""

    before_unmap: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.before_unmap is not None:
            self.before_unmap()


class Held:
    """Stands for the mapping of memory that somebody else has allocated, and pinned: it lives as long as its views."""

    before_unmap: Callable[[], None] | None = None


def map_memory(nbytes: int) -> tuple[Mapping, memoryview]:
    """A mapping, and the `nbytes` of it that begin with a huge page. Raises OSError when the system has no room."""
    # NORESERVE: address space only; what is never touched is never charged.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    mapping = Mapping(-1, nbytes + _HUGE_PAGE_BYTES, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(mapping)
    start = -address_of(memory) % _HUGE_PAGE_BYTES
    return mapping, memory[start : start + nbytes]


def address_of(memory: memoryview) -> int:
    """Where writable memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class _Segment:
    def __init__(self, mapping: Mapping | Held, memory: memoryview, alignment: int) -> None:
        self.mapping = mapping
        self.memory = memory
        self.address = address_of(memory)
        self.extents = Extents(alignment, memory.nbytes)
        self.pages = Pages(_HUGE_PAGE_BYTES, memory.nbytes)
        self.idle_trims = 0  # so many calls of `trim` since a lease has used it
        self.least_refused = memory.nbytes + 1  # no lease of so many bytes finds room, nor any larger one

    def allocate(self, length: int) -> int | None:
        """Offset of a free range, or None. A segment without room, of hundreds, costs a comparison."""
        if length >= self.least_refused:
            return None
        offset = self.extents.allocate(length)
        if offset is None:
            self.least_refused = length
        return offset

    def free(self, offset: int, length: int) -> None:
        """Give a range back."""
        self.least_refused = self.memory.nbytes + 1  # first: an interrupt after it costs a question
        self.extents.free(offset, length)

    def let_go(self, most: int) -> int:
        """Give up to `most` pages back to the system that no lease covers; how many it were."""
        if isinstance(self.mapping, Held):
            return 0
        begin = self.address - address_of(memoryview(self.mapping))
        pages = self.pages.idle(self.extents.free_ranges(0, self.memory.nbytes), most)
        for offset in pages:
            with suppress(OSError):  # locked memory stays (mlockall)
                self.mapping.madvise(mmap.MADV_DONTNEED, begin + offset, self.pages.page_bytes)
            self.pages.gone(offset)
        return len(pages)

    def mend(self, leases: Iterable[_End]) -> None:
        """Find again what is free: all but what these leases have."""
        self.least_refused = self.memory.nbytes + 1
        extents = Extents(self.extents.alignment, self.memory.nbytes)
        for end in leases:
            if end.segment is self:
                extents.take(end.offset, end.length)
        self.extents = extents


class _Retained:
    """What holds a lease, and how to ask whether its copy is over. Equal to itself alone."""

    __slots__ = ("owner", "ready")

    def __init__(self, owner: object, ready: Callable[[], bool]) -> None:
        self.owner = owner
        self.ready = ready


def _drop_first(queue: deque[_Retained]) -> bool:
    """Drop what was retained first, if its copy is over."""
    try:
        first = queue[0]
        if not first.ready():
            return False
        queue.remove(first)  # and not whatever is first by now
    except (IndexError, ValueError):  # another thread was faster
        return False
    return True


class _End(weakref.ref):  # type: ignore[type-arg]  # weakref.ref's type argument adds nothing to a private slot class
    __slots__ = ("length", "offset", "segment")
    segment: _Segment | None  # None: memory of its own, which goes with the lease
    offset: int
    length: int


class BufferPool:
    """Leases of memory whose address modulo `alignment` the caller chooses. Thread-safe.

    Args:
        alignment: bytes.
        segment_bytes: how much is mapped at once, where a lease does not need more; rounded up to whole pages.
        budget_bytes: what the segments may take together, rounded down to whole pages; None for no limit.
        idle_bytes: what may stay in memory for leases to come; None for no limit.
    """

    _gives_back = hasattr(mmap, "MADV_DONTNEED")
    _kept_trims = 1  # a segment stays so many calls of `trim` after its last use

    def __init__(
        self,
        alignment: int,
        segment_bytes: int = SEGMENT_BYTES,
        *,
        budget_bytes: int | None = None,
        idle_bytes: int | None = None,
    ) -> None:
        if alignment < 1 or _HUGE_PAGE_BYTES % alignment:
            raise ValueError(f"an alignment divides a huge page of {_HUGE_PAGE_BYTES} bytes, got {alignment}")
        if budget_bytes is not None and budget_bytes < mmap.PAGESIZE:
            raise ValueError(f"a budget holds at least one page of {mmap.PAGESIZE} bytes, got {budget_bytes}")
        self.alignment = alignment
        self.budget_bytes = None if budget_bytes is None else budget_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._idle_bytes = None if idle_bytes is None else max(idle_bytes, _HUGE_PAGE_BYTES)
        self._segment_bytes = align_up(segment_bytes, mmap.PAGESIZE)
        self._segments: list[_Segment] = []
        self._ended: deque[_End] = deque()
        self._live: dict[int, _End] = {}  # keeps the weak references themselves alive
        self._retained: dict[object, deque[_Retained]] = {}  # by the queue that uses them, first in first out
        self._lock = threading.Lock()
        self._closed = False

    def lease(self, nbytes: int, skew: int = 0) -> tuple[memoryview, Buffer]:
        """A writable view of `nbytes` bytes with `address % alignment == skew`, and the padded buffer over it.

        Raises:
            StoreFull: the budget has no room for it.
            StoreClosed: after `close`.
        """
        if not 0 <= skew < self.alignment:
            raise ValueError(f"a skew lies within the alignment of {self.alignment} bytes, got {skew}")
        length = align_up(max(1, skew + nbytes), self.alignment)
        if self._retained:
            self._let_go()
        with self._lock:
            if self._closed:
                raise StoreClosed("the pool is closed; make a new one")
            ended = bool(self._ended)
            if ended:
                self._reclaim()
            segment, offset = (None, 0) if self._goes_alone(length) else self._place(length)
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
        # Not by Buffer(...), which is a Python function: there is a lease for every read.
        return view, tuple.__new__(Buffer, (address + start, nbytes, view, True, False, False))

    def retain(self, owner: object, ready: Callable[[], bool], queue: object = None) -> None:
        """Keep what holds a lease until `ready()`, a device's answer that its copy is over.

        It is asked at the next lease or `trim`, on that thread, once all before it on the same `queue` (a stream, which
        runs its copies in order) are over. May be called on any thread at any bytecode.
        """
        self._retained.setdefault(queue, deque()).append(_Retained(owner, ready))

    @property
    def retains(self) -> bool:
        """Whether copies of a device still use leases that nobody else has: their end makes room."""
        return any(self._retained.values())

    def trim(self, *, all_idle: bool = False) -> None:
        """Give back segments that no lease has used for some calls (call it once a step), or `all_idle` ones now."""
        self._let_go()
        with self._lock:
            self._reclaim()
            # An interrupt may have lost the end of a lease, or a range that no lease got: see what there really is.
            self._live = {key: end for key, end in self._live.items() if end() is not None}
            for segment in self._segments:
                segment.mend(self._live.values())
            self._limit_idle()
            kept_trims = 0 if all_idle else self._kept_trims
            self._segments = [s for s in self._segments if s.idle_trims < kept_trims or s.extents.used_bytes]
            for segment in self._segments:
                segment.idle_trims += 1

    def close(self) -> None:
        """Give back every segment, those still on lease when their last lease ends. Idempotent; `lease` fails then."""
        with self._lock:
            self._closed = True
            self._segments = []
            self._live.clear()  # the ends of leases are of no interest any more, and they hold the segments
            self._ended.clear()

    @property
    def leased_bytes(self) -> int:
        """Bytes out on lease, padding included; none once closed."""
        with self._lock:
            self._reclaim()
            return sum(end.length for end in self._live.values())

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the segments, used or not, and of leases with memory of their own."""
        alone = sum(end.length for end in self._live.copy().values() if end.segment is None and end() is not None)
        return alone + sum(segment.memory.nbytes for segment in self._segments)

    def _let_go(self) -> None:
        """Drop retained leases whose copy is over. Call without the lock: `ready` and finalisers are foreign code."""
        for queue in list(self._retained.values()):
            while queue and _drop_first(queue):
                pass

    def _map(self, nbytes: int) -> tuple[Mapping | Held, memoryview]:
        """Memory for a segment of `nbytes`, a whole number of pages."""
        return map_memory(nbytes)

    def _reclaim(self) -> None:
        while self._ended:
            end = self._ended.popleft()
            if self._live.pop(id(end), None) is not None and end.segment is not None:
                end.segment.free(end.offset, end.length)

    def _goes_alone(self, length: int) -> bool:
        return self._idle_bytes is not None and length > self._idle_bytes

    def _place(self, length: int) -> tuple[_Segment, int]:
        # A segment made for a larger lease than usual is for such ones only, or it would never be out of use ...
        usual = length <= self._segment_bytes
        found = self._find(length, self._segment_bytes if usual else None)
        if found is not None:
            return found
        least = align_up(length, mmap.PAGESIZE)
        try:
            room = self._room_for(least)
            try:
                mapping, memory = self._map(room)
            except OSError as error:  # the system has no room for as much, but perhaps for what is asked for
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
        """Find room in a segment, of at most so many bytes."""
        for segment in self._segments:
            if length < segment.least_refused and (most_bytes is None or segment.memory.nbytes <= most_bytes):
                offset = segment.allocate(length)
                if offset is not None:
                    return segment, offset
        return None

    def _touch(self, segment: _Segment, offset: int, length: int) -> None:
        """Note that a lease is about to use a range; give back as many free pages as that takes for the first time."""
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

    def _give_back(self, pages: int) -> None:
        """Give so many pages back to the system, as far as they are free."""
        for segment in reversed(self._segments):  # the first ones are used again first
            pages -= segment.let_go(pages)
            if not pages:
                return

    def _room_for(self, nbytes: int) -> int:
        """The size of a new segment for a lease of `nbytes`. Raises StoreFull."""
        wanted = max(self._segment_bytes, nbytes)
        if self.budget_bytes is None:
            return wanted
        used = sum(segment.memory.nbytes for segment in self._segments if segment.extents.used_bytes)
        if self.budget_bytes - used < nbytes:
            raise StoreFull(
                f"a lease of {nbytes} bytes was asked of a pool whose budget is {self.budget_bytes} bytes, with {used} "
                "in segments on lease; raise the budget or let go of leases"
            )
        if self.budget_bytes - self.mapped_bytes < nbytes:  # those without leases are all too small: make way
            self._segments = [segment for segment in self._segments if segment.extents.used_bytes]
        return min(wanted, self.budget_bytes - self.mapped_bytes)
