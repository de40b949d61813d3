"""Space: which ranges of one scratch file are whose, how far it is laid out, and what of it is given back.

However the ranges of a random load come to lie, the file keeps no more blocks than a quarter above what is in use at
one time: once a step free ranges are punched, the highest first, wherever they are.

Guarantees:

1. A range belongs to one write until that is discarded and has ended, however it ended.
2. `discard` only appends to a deque: a finaliser may call it at any bytecode. The next `take` or look does the rest.
3. A hole is punched only into a range taken from the free ones for that time, so no write can be in it.
4. The main thread, which Ctrl-C interrupts, changes no range: it appends, looks, and leaves the rest to workers.

The file is laid out ahead with fallocate(2): few, contiguous extents, and a full disk is met here rather than in a
write. Both that and punching are system calls of milliseconds: they run on workers, and never with the lock that
allocation needs.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterator

from .._buffer import Location
from .._errors import StoreBroken, StoreFull
from .._extents import Extents, align_up
from .._ticket import Ticket
from .syscalls import Syscalls

# Extents keep 4 KiB: the page of the device mapping, so that neighbours never share a block.
EXTENT_ALIGNMENT = 4096
# The file grows by an eighth at most, in whole pieces of 16 to 64 MiB: a write that crosses from one piece to another
# has to wait for reads under way (measured, with a sixteenth of any size: 16 MiB took 11 ms rather than 8).
LEAST_GROWTH_BYTES = 16 << 20
GROWTH_BYTES = 64 << 20
_LEAST_SLACK_BYTES = 1 << 20


def growth_bytes(end: int) -> int:
    """The pieces in which to lay out a file that is needed up to `end`."""
    piece = GROWTH_BYTES
    while piece > LEAST_GROWTH_BYTES and piece > end // 8:
        piece //= 2
    return piece


def slack_bytes(need: int) -> int:
    """A file that needs so many blocks keeps up to once this more, and is left alone up to twice: a step that differs
    a little from the last one changes nothing."""
    return align_up(max(need // 8, _LEAST_SLACK_BYTES), EXTENT_ALIGNMENT)


def need_bytes(step_bytes: int, before: int) -> int:
    """Blocks that steps need, the last of which had `step_bytes` at most; a larger one before is forgotten slowly."""
    return max(step_bytes, before - before // 16 if before >= _LEAST_SLACK_BYTES else 0)


def extent_of(ticket: Ticket, block: int) -> Location:
    """Lay out a write whose bytes keep their place within a block; the offset is still to be chosen."""
    assert ticket.buffer is not None
    skew, nbytes = ticket.buffer.address % block, ticket.nbytes
    return Location(0, align_up(skew + nbytes, EXTENT_ALIGNMENT) if nbytes else 0, nbytes, skew)


class Space:
    """The ranges of a scratch file in `directory` (for messages), of `capacity_bytes` at most. Thread-safe."""

    def __init__(self, directory: str, syscalls: Syscalls, capacity_bytes: int | None = None) -> None:
        self._directory = directory
        self.capacity_bytes = capacity_bytes
        self._syscalls = syscalls
        self._lock = threading.Lock()  # of the extents
        self._layout = threading.Lock()  # while the file's blocks are added to or given back
        whole = None if capacity_bytes is None else capacity_bytes // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
        self._extents = Extents(EXTENT_ALIGNMENT, whole)
        self._discarded: deque[Ticket] = deque()
        self.laid_out_bytes = 0  # up to here the file has had its blocks; punched holes apart
        self._step_bytes = 0  # the most in use since the last trim
        self._need = 0
        self._punching: tuple[int, int] | None = None
        self._can_punch = self._can_lay_out = True

    def take(self, length: int) -> int:
        """Take a free range of `length` bytes; its offset. Raises StoreFull."""
        offset, punching = self._allocate(length)
        while offset is None and punching:  # of a file at its capacity, all that is free may be about to be punched
            with self._layout:
                pass
            offset, punching = self._allocate(length)
        if offset is None:
            raise StoreFull(
                f"{length} bytes do not fit into a scratch file in {self._directory!r} that may have "
                f"{self.capacity_bytes} bytes, {self.used_bytes} of them in use; raise that or discard writes"
            )
        return offset

    def give_back(self, offset: int, length: int) -> None:
        """Free a range that `take` gave, for a write that never began."""
        with self._lock:
            self._extents.free(offset, length)

    def discard(self, ticket: Ticket) -> None:
        """Free what the write took, as soon as it has ended. Any number of times."""
        self._discarded.append(ticket)

    @property
    def used_bytes(self) -> int:
        """Bytes that belong to writes begun and not yet discarded."""
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
            target = min(target, self._extents.capacity)
        room = end - self.laid_out_bytes
        if self._has_too_many(self._syscalls.allocated(fd) + room):
            self.punch(fd, room)
        with self._layout:
            start = self.laid_out_bytes
            if end <= start:
                return
            for stop in (target, end):  # what is needed now, where the disk has no room for more
                if not self._can_lay_out:
                    break
                try:
                    _again(self._syscalls.fallocate, fd, start, stop - start)
                    break
                except OSError as error:
                    if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                        self._can_lay_out = False  # the file system lays files out as they are written
                    elif error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise StoreBroken(f"cannot lay out a file in {self._directory!r}: {error}") from error
                    elif stop == end:
                        raise StoreFull(f"no space left in {self._directory!r}: {error}") from error
            self.laid_out_bytes = stop

    def begin_trim(self, allocated_bytes: int) -> bool:
        """Once a step: whether the file has more blocks, `allocated_bytes`, than such steps need; `punch` then."""
        self._need = need_bytes(self._step_bytes, self._need)
        self._step_bytes = 0
        return self._has_too_many(allocated_bytes)

    def punch(self, fd: int, room: int = 0) -> None:
        """Give blocks of free ranges back until the file, with `room` more, has few enough. For a worker."""
        need = max(self._need, self._step_bytes)
        most = need + slack_bytes(need) - room
        with self._lock:
            self._reclaim()
            ranges = self._extents.free_ranges(0, self.laid_out_bytes)
        for offset, length in _pieces(ranges, slack_bytes(need)):
            with self._layout:
                if not self._can_punch or self._syscalls.allocated(fd) <= most:
                    return
                self._punch(fd, offset, length)

    def forget(self) -> None:
        """In a forked child: locks may be held by threads that do not exist here."""
        self._lock, self._layout = threading.Lock(), threading.Lock()

    def _punch(self, fd: int, offset: int, length: int) -> None:
        """With the layout's lock: a range that was free a moment ago."""
        with self._lock:
            try:
                self._extents.take(offset, length)
            except ValueError:  # some of it has been taken since
                return
            self._punching = offset, length
        try:
            _again(self._syscalls.punch, fd, offset, length)
        except OSError:  # the file system cannot: its blocks stay as they are, which does no harm
            self._can_punch = False
        with self._lock:
            self._punching = None
            self._extents.free(offset, length)
            if offset + length == self.laid_out_bytes:
                self.laid_out_bytes = offset

    def _has_too_many(self, allocated_bytes: int) -> bool:
        need = max(self._need, self._step_bytes)
        return self._can_punch and allocated_bytes > need + 2 * slack_bytes(need)

    def _allocate(self, length: int) -> tuple[int | None, bool]:
        """An offset, if there is room; and whether there may be once a punch has ended."""
        with self._lock:
            if self._discarded:
                self._reclaim()
            offset = self._extents.allocate(length)
            self._step_bytes = max(self._step_bytes, self._used_bytes())
            return offset, self._punching is not None

    def _used_bytes(self) -> int:
        """With the lock: what writes have, also those that have been discarded and ended since the last look."""
        return self._extents.used_bytes - (self._punching[1] if self._punching is not None else 0)

    def _reclaim(self) -> None:
        """On a worker, with the lock: free what discarded writes had that have ended."""
        discarded = self._discarded
        for _ in range(len(discarded)):
            ticket = discarded.popleft()
            if not ticket.done():
                discarded.append(ticket)
            elif ticket.location is not None:  # else taken back before it began, or discarded twice
                location, ticket.location = ticket.location, None
                if location.length:
                    self._extents.free(location.offset, location.length)


def _pieces(ranges: list[tuple[int, int]], most_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges in pieces of at most so many bytes, the highest first: those are used again last."""
    for begin, length in reversed(ranges):
        for stop in range(begin + length, begin, -most_bytes):
            start = max(begin, stop - most_bytes)
            yield start, stop - start


def _again(call: Callable[[int, int, int], None], fd: int, offset: int, length: int) -> None:
    """Make a system call until no signal for the program, which this thread happened to get, interrupts it."""
    while True:
        try:
            return call(fd, offset, length)
        except InterruptedError:
            continue
