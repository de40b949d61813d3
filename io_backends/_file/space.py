"""Space: who has which ranges of a scratch file, how far the file is laid out, and which blocks go back.

However ranges of a random load are placed, the file keeps at most a quarter more blocks than are in use at one time:
once per step, free ranges are punched wherever they are, the highest first.

Guarantees:

1. A range belongs to one write until that write is discarded and has ended, however it ended.
2. `discard` only appends to a deque, so a finalizer may call it at any bytecode. The next `take` or `punch` frees it.
3. A hole is punched only into a range that was taken from the free ones for that time, so no write can be in it.
4. Below a limit that has been lowered (`resize`), ranges in use never exceed it once those taken before are free, and
   once a step the file gives back blocks that exceed it. Which offsets they have does not matter.
5. The main thread, which Ctrl-C interrupts, changes no range: it appends, reads, and leaves the rest to workers.

The file is laid out ahead with fallocate(2), in few contiguous extents, so a full disk shows here and not in a write.
Laying out and punching are system calls of milliseconds; they run on workers, never with the allocation lock.
"""

from __future__ import annotations

import errno
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator

from .._buffer import Location
from .._errors import StoreBroken, StoreFull
from .._extents import Extents, align_up
from .._ticket import Ticket
from .syscalls import Syscalls

# Extents are multiples of 4 KiB, the page of the device mapping, so neighbors never share a block.
EXTENT_ALIGNMENT = 4096
# The file grows by at most an eighth, in pieces of 16 to 64 MiB. A write that crosses into another piece waits for
# reads in flight (measured with pieces of a sixteenth: 16 MiB took 11 ms instead of 8).
LEAST_GROWTH_BYTES = 16 << 20
GROWTH_BYTES = 64 << 20
_LEAST_SLACK_BYTES = 1 << 20
# Most of what counts as the file's that a file system needs to find its blocks.
_OWN_BYTES, _OWN_SHARE = 1 << 16, 1 / 1024


def growth_bytes(end: int) -> int:
    """Size of the pieces in which to lay out a file that is needed up to `end`."""
    piece = GROWTH_BYTES
    while piece > LEAST_GROWTH_BYTES and piece > end // 8:
        piece //= 2
    return piece


def slack_bytes(need: int) -> int:
    """Extra blocks that a file keeps beyond `need`; trimming starts at twice this, so that small changes do nothing."""
    return align_up(max(need // 8, _LEAST_SLACK_BYTES), EXTENT_ALIGNMENT)


def need_bytes(step_bytes: int, before: int) -> int:
    """Blocks that steps need. The last step had at most `step_bytes`; a larger earlier need decays slowly."""
    return max(step_bytes, before - before // 16 if before >= _LEAST_SLACK_BYTES else 0)


def extent_of(ticket: Ticket, block: int) -> Location:
    """Lay out a write whose bytes keep their offset within a block. The file offset is still 0."""
    assert ticket.buffer is not None
    skew, nbytes = ticket.buffer.address % block, ticket.nbytes
    return Location(0, align_up(skew + nbytes, EXTENT_ALIGNMENT) if nbytes else 0, nbytes, skew)


class Space:
    """The ranges of a scratch file in `directory` (for messages), at most `capacity_bytes`. Thread-safe."""

    def __init__(self, directory: str, syscalls: Syscalls, capacity_bytes: int | None = None) -> None:
        self._directory = directory
        self.capacity_bytes = self._first_bytes = capacity_bytes
        self._syscalls = syscalls
        self._lock = threading.Lock()  # of the extents
        self._layout = threading.Lock()  # held while blocks are laid out or punched
        self._extents = Extents(EXTENT_ALIGNMENT, self._limit)
        self._discarded: deque[Ticket] = deque()
        self.laid_out_bytes = 0  # the file has blocks up to here, except in punched holes
        self._step_bytes = 0  # the most in use since the last trim
        self._need = 0
        self._punching: tuple[int, int] | None = None
        self._can_punch = self._can_lay_out = True

    def take(self, length: int) -> int:
        """Take a free range of `length` bytes and return its offset. Raises StoreFull."""
        offset, punching = self._allocate(length)
        while offset is None and punching:  # at capacity, all free ranges may be about to be punched
            with self._layout:
                pass
            offset, punching = self._allocate(length)
        if offset is None:
            raise StoreFull(
                f"{length} bytes do not fit into a scratch file in {self._directory!r} limited to "
                f"{self.capacity_bytes} bytes, {self.used_bytes} of them in use; raise the limit or discard writes"
            )
        return offset

    def give_back(self, offset: int, length: int) -> None:
        """Free a range from `take` whose write never began."""
        with self._lock:
            self._extents.free(offset, length)

    def resize(self, share: float) -> None:
        """Take at most `share` times the first capacity from now on, if there is one."""
        if self._first_bytes is not None:
            self.capacity_bytes = int(share * self._first_bytes)

    def discard(self, ticket: Ticket) -> None:
        """Free a write's range once the write has ended. Idempotent."""
        self._discarded.append(ticket)

    @property
    def used_bytes(self) -> int:
        """Bytes of writes that have begun and are not discarded."""
        with self._lock:
            ended = {ticket for ticket in self._discarded.copy() if ticket.done() and ticket.location is not None}
            freed: int = sum(ticket.location.length for ticket in ended)
            return self._used_bytes() - freed

    def reserve(self, fd: int, end: int) -> None:
        """Lay out the file up to `end`. Raises StoreFull, StoreBroken."""
        if end <= self.laid_out_bytes:
            return
        target = align_up(end, growth_bytes(end))
        if self._extents.capacity is not None:
            target = max(end, int(min(target, self._extents.capacity, self._lowered())))
        room = end - self.laid_out_bytes
        if self._has_too_many(self._syscalls.allocated(fd) + room):
            self.punch(fd, room)
        with self._layout:
            start = self.laid_out_bytes
            if end <= start:
                return
            for stop in (target, end):  # only what is needed now, if the disk has no room for more
                if not self._can_lay_out:
                    break
                try:
                    _again(self._syscalls.fallocate, fd, start, stop - start)
                    break
                except OSError as error:
                    if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                        self._can_lay_out = False
                    elif error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise StoreBroken(f"cannot lay out a file in {self._directory!r}: {error}") from error
                    elif stop == end:
                        raise StoreFull(f"no space left in {self._directory!r}: {error}") from error
            self.laid_out_bytes = stop

    def begin_trim(self, allocated_bytes: int) -> bool:
        """Once per step: whether the file's `allocated_bytes` exceed what steps need; then call `punch`."""
        self._need = need_bytes(self._step_bytes, self._need)
        self._step_bytes = 0
        return self._has_too_many(allocated_bytes)

    def punch(self, fd: int, room: int = 0) -> None:
        """Free blocks of free ranges until the file, with `room` more, has few enough. For a worker."""
        need = max(self._need, self._step_bytes)
        most = min(need + slack_bytes(need), self._lowered()) - room
        piece = min(slack_bytes(need), GROWTH_BYTES) if self._lowered() < math.inf else slack_bytes(need)
        with self._lock:
            self._reclaim()
            ranges = self._extents.free_ranges(0, self.laid_out_bytes)
        for offset, length in _pieces(ranges, piece):
            with self._layout:
                if not self._can_punch or self._syscalls.allocated(fd) <= most:
                    return
                self._punch(fd, offset, length)

    def forget(self) -> None:
        """In a forked child: replace locks that threads of the parent may hold."""
        self._lock, self._layout = threading.Lock(), threading.Lock()

    def _punch(self, fd: int, offset: int, length: int) -> None:
        """With the layout lock: punch a range that was free a moment ago."""
        with self._lock:
            try:
                self._extents.take(offset, length)
            except ValueError:  # some of it has been taken since
                return
            self._punching = offset, length
        try:
            _again(self._syscalls.punch, fd, offset, length)
        except OSError:  # the file system cannot, and keeps the blocks
            self._can_punch = False
        with self._lock:
            self._punching = None
            self._extents.free(offset, length)
            if offset + length == self.laid_out_bytes:
                self.laid_out_bytes = offset

    def _has_too_many(self, allocated_bytes: int) -> bool:
        need = max(self._need, self._step_bytes)
        # Beyond the limit by more than the file system's own blocks, which no punching frees.
        lowered = self._lowered() * (1 + _OWN_SHARE) + _OWN_BYTES
        return self._can_punch and allocated_bytes > min(need + 2 * slack_bytes(need), lowered)

    @property
    def _limit(self) -> int | None:
        """Bytes of whole blocks that ranges may take together; None for no limit."""
        return None if self.capacity_bytes is None else self.capacity_bytes // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT

    def _lowered(self) -> float:
        """The limit, if it is lower than once; else none that ranges do not keep to anyway."""
        limit, capacity = self._limit, self._extents.capacity
        return limit if limit is not None and capacity is not None and limit < capacity else math.inf

    def _allocate(self, length: int) -> tuple[int | None, bool]:
        """An offset, if there is room; and whether a punch in progress may make room."""
        with self._lock:
            if self._discarded:
                self._reclaim()
            limit, capacity = self._limit, self._extents.capacity
            if limit is not None and capacity is not None and limit > capacity:
                self._extents.grow(limit)
            fits = self._used_bytes() + align_up(length, EXTENT_ALIGNMENT) <= self._lowered()
            offset = self._extents.allocate(length) if fits else None
            self._step_bytes = max(self._step_bytes, self._used_bytes())
            return offset, fits and self._punching is not None

    def _used_bytes(self) -> int:
        """With the lock: bytes of all writes, including ended ones whose discard is not applied yet."""
        return self._extents.used_bytes - (self._punching[1] if self._punching is not None else 0)

    def _reclaim(self) -> None:
        """On a worker, with the lock: free the ranges of discarded writes that have ended."""
        discarded = self._discarded
        for _ in range(len(discarded)):
            ticket = discarded.popleft()
            if not ticket.done():
                discarded.append(ticket)
            elif ticket.location is not None:  # else cancelled before it began, or discarded twice
                location, ticket.location = ticket.location, None
                if location.length:
                    self._extents.free(location.offset, location.length)


def _pieces(ranges: list[tuple[int, int]], most_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut ranges into pieces of at most `most_bytes`, highest first: those are reused last."""
    for begin, length in reversed(ranges):
        for stop in range(begin + length, begin, -most_bytes):
            start = max(begin, stop - most_bytes)
            yield start, stop - start


def _again(call: Callable[[int, int, int], None], fd: int, offset: int, length: int) -> None:
    """Repeat a system call until no signal, which happened to reach this thread, interrupts it."""
    while True:
        try:
            return call(fd, offset, length)
        except InterruptedError:
            continue
