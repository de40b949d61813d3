"""Space: which ranges of one scratch file are whose, how far it is laid out, and what of it is given back.

Guarantees:

1. A range belongs to one write until that is discarded and has ended, however it ended.
2. `discard` only appends to a deque: a finaliser may call it at any bytecode. The next `take` or look does the rest.
3. A hole is punched only into ranges taken from the free ones for that time, so no write can be in them.

The file is laid out ahead with fallocate(2): few, contiguous extents, and a full disk is met here rather than in a
write. Both that and punching are system calls of milliseconds: they run on workers, and never with the lock that
allocation needs.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable

from ._errors import StoreBroken, StoreFull
from ._extents import Extents, align_up
from ._store import Location, Ticket
from ._syscalls import Syscalls

# Extents keep 4 KiB: the page of the device mapping, so that neighbours never share a block.
EXTENT_ALIGNMENT = 4096
# The file grows and shrinks by this much: a step that differs a little from the last one changes nothing.
GROWTH_BYTES = 64 << 20


def extent_of(ticket: Ticket, block: int) -> Location:
    """What a write takes where bytes keep their place within a block; the offset is still to be chosen."""
    assert ticket.buffer is not None
    skew, nbytes = ticket.buffer.address % block, ticket.nbytes
    return Location(0, align_up(skew + nbytes, EXTENT_ALIGNMENT) if nbytes else 0, nbytes, skew)


class Space:
    """The ranges of a scratch file in `directory` (for messages), of `capacity_bytes` at most. Thread-safe."""

    def __init__(self, directory: str, syscalls: Syscalls, capacity_bytes: int | None = None) -> None:
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._syscalls = syscalls
        self._lock = threading.Lock()  # of the extents
        self._layout = threading.Lock()  # while the file's blocks are added to or given back
        whole = None if capacity_bytes is None else capacity_bytes // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
        self._extents = Extents(EXTENT_ALIGNMENT, whole)
        self._discarded: deque[Ticket] = deque()
        self.laid_out_bytes = 0  # up to here the file has had its blocks; punched holes apart
        self._punching: list[tuple[int, int]] = []
        self._can_punch = True

    def take(self, length: int) -> int:
        """The offset of `length` bytes that are nobody else's. Raises StoreFull."""
        with self._lock:
            if self._discarded:
                self._reclaim()
            offset = self._extents.allocate(length)
        if offset is None and self._punching:  # of a file at its capacity, all that is free may be about to be punched
            with self._layout:
                self._end_punching()
            with self._lock:
                self._reclaim()
                offset = self._extents.allocate(length)
        if offset is None:
            raise StoreFull(
                f"{length} bytes do not fit into a scratch file in {self._directory!r} that may have "
                f"{self._capacity_bytes} bytes, {self.used_bytes} of them in use; raise that or discard writes"
            )
        return offset

    def give_back(self, offset: int, length: int) -> None:
        """What `take` gave is free again; for a write that never began to be there."""
        with self._lock:
            self._extents.free(offset, length)

    def discard(self, ticket: Ticket) -> None:
        """What the write took comes free as soon as it has ended. Any number of times."""
        self._discarded.append(ticket)

    @property
    def used_bytes(self) -> int:
        """Bytes that belong to writes begun and not yet discarded."""
        with self._lock:
            self._reclaim()
            return self._extents.used_bytes - sum(length for _, length in self._punching)

    def reserve(self, fd: int, end: int) -> None:
        """Lay out the file up to `end`. Raises StoreFull, StoreBroken."""
        if end <= self.laid_out_bytes:
            return
        with self._layout:
            start = self.laid_out_bytes
            if end <= start:
                return
            target = align_up(end, GROWTH_BYTES)
            if self._extents.capacity is not None:
                target = min(target, self._extents.capacity)
            for stop in (target, end):  # what is needed now, where the disk has no room for more
                try:
                    _again(self._syscalls.fallocate, fd, start, stop - start)
                    break
                except OSError as error:
                    if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                        stop = target  # the file system lays files out as they are written
                        break
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise StoreBroken(f"cannot lay out a file in {self._directory!r}: {error}") from error
                    if stop == end:
                        raise StoreFull(f"no space left in {self._directory!r}: {error}") from error
            self.laid_out_bytes = stop

    def begin_trim(self, allocated_bytes: int) -> bool:
        """Once a step: whether free blocks lie beyond what the step before reached; `punch` then gives them back.

        `allocated_bytes`: of the file's blocks now.
        """
        with self._lock:
            self._reclaim()
            extents = self._extents
            keep = max(GROWTH_BYTES, align_up(extents.high_water, GROWTH_BYTES))
            extents.high_water = 0
            if not self._can_punch or self._punching or self.laid_out_bytes <= keep:
                return False
            ranges = extents.free_ranges(keep, self.laid_out_bytes)
            held = self.laid_out_bytes - sum(length for _, length in ranges)
            if allocated_bytes - held < GROWTH_BYTES:  # too little, or given back before
                return False
            for offset, length in ranges:
                extents.take(offset, length)
            self._punching = ranges
            return True

    def punch(self, fd: int) -> None:
        """Give the blocks of the ranges back that `begin_trim` found. For a worker: it takes as long as it takes."""
        with self._layout:
            try:
                for offset, length in self._punching:
                    _again(self._syscalls.punch, fd, offset, length)
            except OSError:  # the file system cannot: its blocks stay as they are, which harms nobody
                self._can_punch = False
            self._end_punching()

    def forget(self) -> None:
        """In a forked child: locks may be held by threads that do not exist here."""
        self._lock, self._layout = threading.Lock(), threading.Lock()

    def _end_punching(self) -> None:
        """With the layout's lock: the ranges to be punched, whether they have been or not, are free again."""
        with self._lock:
            ranges, self._punching = self._punching, []
            for offset, length in ranges:
                self._extents.free(offset, length)
            if ranges and sum(ranges[-1]) == self.laid_out_bytes:
                self.laid_out_bytes = ranges[-1][0]

    def _reclaim(self) -> None:
        """With the lock: free what discarded writes had that have ended."""
        discarded = self._discarded
        for _ in range(len(discarded)):
            ticket = discarded.popleft()
            if not ticket.done():
                discarded.append(ticket)
            elif ticket.location is not None:  # else taken back before it began, or discarded twice
                location, ticket.location = ticket.location, None
                if location.length:
                    self._extents.free(location.offset, location.length)


def _again(call: Callable[[int, int, int], None], fd: int, offset: int, length: int) -> None:
    """Make a system call until no signal for the program, which this thread happened to get, interrupts it."""
    while True:
        try:
            return call(fd, offset, length)
        except InterruptedError:
            continue
