"""PosixStore: one nameless scratch file, direct I/O where it works, several workers.

Guarantees beyond those of `Store`:

1. No bounce copy for the bulk of a buffer: the aligned middle goes straight from its memory. The unaligned head and
   tail (below one block each) are copied into blocks that are written before and behind it in the same system call,
   so one contiguous read brings everything back.
2. Space is reused: the file grows to the high-water mark of what is stored at once, not of what was ever written.
3. Nothing is left on disk when the process ends, however it ends (`_scratch`).
4. After a fork the child owns nothing of it: its descriptor is closed, every call raises StoreClosed.

Assumptions: writes to memory in flight may tear the copy, so the submitter checks that nobody wrote (the engine does).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from ._errors import ShortTransfer, StoreBroken, StoreClosed, StoreFull
from ._extents import Extents, align_up
from ._rate import PIECE_BYTES, RateLimit
from ._scratch import ScratchFile, open_scratch
from ._store import Buffer, Location, Ticket
from ._syscalls import Pieces, Syscalls
from ._workers import Workers

# Extents keep 4 KiB: the page of the device mapping, so that neighbours never share a block.
EXTENT_ALIGNMENT = 4096
# The file is laid out this far ahead: few, contiguous extents, and a full disk is met here rather than in a write.
GROWTH_BYTES = 64 << 20
_BOUNCE_BYTES = 1 << 20  # for reads into memory that is not padded: copied through in pieces of this size


class PosixStore:
    """A `Store` on a file system.

    Args:
        directory: an existing, writable directory.
        threads: workers.
        rate_bytes_per_s: limits writes and reads, each on its own, for experiments on slow links.
        syscalls: replaced in tests.

    Raises:
        StoreBroken: no scratch file can be made there. The file is made by the first transfer; `open()` makes it now.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        threads: int = 2,
        rate_bytes_per_s: float | None = None,
        syscalls: Syscalls | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._syscalls = syscalls or Syscalls()
        self._file: ScratchFile | None = None
        self._descriptors: list[int] = []  # that of `_file`; taken out by `pop`, which is atomic, so closed once
        self._closed = False
        self._lock = threading.Lock()
        self._extents = Extents(EXTENT_ALIGNMENT)
        self._reserved_bytes = 0
        self._orphans: list[Ticket] = []  # discarded while running: their extents come free when they have ended
        self._write_limit = RateLimit(rate_bytes_per_s) if rate_bytes_per_s is not None else None
        self._read_limit = RateLimit(rate_bytes_per_s) if rate_bytes_per_s is not None else None
        self._workers = Workers(threads, "tba-io", self._close_file)
        self._local = threading.local()
        _stores.add(self)

    def open(self) -> ScratchFile:
        """The scratch file, made on the first call."""
        file = self._file
        if file is None:
            with self._lock:
                file = self._file
                if file is None and not self._closed:
                    file = self._file = open_scratch(str(self.directory), self._syscalls)
                    self._descriptors.append(file.fd)
                    if self._closed:  # meanwhile, by somebody who found nothing to close
                        self._close_file()
                        file = None
            if file is None:
                raise StoreClosed(f"the store on {str(self.directory)!r} is closed; make a new one")
        return file

    @property
    def alignment(self) -> int:
        return self.open().alignment

    def write(
        self,
        buffer: Buffer,
        *,
        on_done: Callable[[Ticket], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> Ticket:
        skew = buffer.address % self.alignment
        length = align_up(max(1, skew + buffer.nbytes), EXTENT_ALIGNMENT)
        with self._lock:
            self._free_orphans()
            offset = self._extents.allocate(length)
        assert offset is not None  # the file has no capacity: a full disk shows itself in the worker
        location = Location(offset, length, buffer.nbytes, skew)
        ticket = Ticket(buffer, location, self._write, on_done, before)
        self._workers.submit(ticket, urgent=False)
        return ticket

    def read(
        self,
        location: Location,
        buffer: Buffer,
        *,
        on_done: Callable[[Ticket], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> Ticket:
        if buffer.nbytes != location.nbytes:
            raise ValueError(f"asked to read {location.nbytes} bytes into a buffer of {buffer.nbytes}")
        ticket = Ticket(buffer, location, self._read, on_done, before)
        self._workers.submit(ticket, urgent=True)
        return ticket

    def discard(self, ticket: Ticket) -> None:
        ended = ticket.cancel() or ticket.done()
        with self._lock:
            if ticket.location is None:
                return
            if ended:
                self._free(ticket)
            else:
                self._orphans.append(ticket)
            self._free_orphans()

    def allocated_bytes(self) -> int:
        file = self._file
        return 0 if file is None or self._closed else os.fstat(file.fd).st_blocks * 512

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that belong to writes not yet discarded."""
        with self._lock:
            self._free_orphans()
            return self._extents.used_bytes

    def close(self) -> None:
        self._closed = True
        self._workers.stop()
        self._workers.join()

    def abandon(self) -> None:
        """`close` without waiting; safe in a finaliser, on any thread. The last worker closes the file."""
        self._closed = True
        self._workers.stop()

    # -- on the workers ------------------------------------------------------------------------------------------

    def _write(self, ticket: Ticket) -> None:
        if not ticket.nbytes:
            return
        buffer, location, file = ticket.buffer, ticket.location, self.open()
        assert buffer is not None
        self._reserve(file, location.offset + location.length)
        block = file.alignment
        head = -buffer.address % block if file.direct else 0
        head = min(head, buffer.nbytes)
        middle = (buffer.nbytes - head) // block * block
        tail = buffer.nbytes - head - middle
        pieces: list[tuple[int, int]] = []
        if head or tail:
            bounce, first = self._blocks(block)
            if head:
                ctypes.memmove(bounce + location.skew, buffer.address, head)
                pieces.append((bounce, block))
            if middle:
                pieces.append((buffer.address + head, middle))
            if tail:
                ctypes.memmove(bounce + block, buffer.address + head + middle, tail)
                pieces.append((bounce + block, block if file.direct else tail))
            del first
        else:
            pieces.append((buffer.address, middle))
        self._move(self._syscalls.pwritev, file, pieces, location, self._write_limit)
        ticket.moved_bytes = sum(length for _, length in pieces)

    def _read(self, ticket: Ticket) -> None:
        if not ticket.nbytes:
            return
        buffer, location, file = ticket.buffer, ticket.location, self.open()
        assert buffer is not None
        block = file.alignment
        skew = location.skew
        length = align_up(skew + location.nbytes, block)
        if buffer.padded and buffer.address % block == skew:
            self._move(self._syscalls.preadv, file, [(buffer.address - skew, length)], location, self._read_limit)
        else:
            self._read_through_bounce(file, buffer, location, length)
        ticket.moved_bytes = length

    def _read_through_bounce(self, file: ScratchFile, buffer: Buffer, location: Location, length: int) -> None:
        with mmap.mmap(-1, _BOUNCE_BYTES) as memory:
            anchor = ctypes.c_char.from_buffer(memory)
            bounce = ctypes.addressof(anchor)
            del anchor
            for start in range(0, length, _BOUNCE_BYTES):
                piece = min(_BOUNCE_BYTES, length - start)
                self._move(
                    self._syscalls.preadv,
                    file,
                    [(bounce, piece)],
                    location._replace(offset=location.offset + start),
                    self._read_limit,
                )
                begin = max(start, location.skew)
                end = min(start + piece, location.skew + location.nbytes)
                if end > begin:
                    ctypes.memmove(buffer.address + begin - location.skew, bounce + begin - start, end - begin)

    def _move(
        self,
        call: Callable[[int, Pieces, int], int],
        file: ScratchFile,
        pieces: Pieces,
        location: Location,
        limit: RateLimit | None,
    ) -> None:
        """Move every byte of `pieces` to or from `location.offset`, however the system cuts the transfer."""
        pieces = list(pieces)
        offset = location.offset
        while pieces:
            batch: Pieces = pieces if limit is None else [(pieces[0][0], min(pieces[0][1], PIECE_BYTES))]
            if limit is not None:
                limit.pace(batch[0][1])
            try:
                moved = call(file.fd, batch, offset)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise StoreFull(f"no space left in {str(self.directory)!r}: {error}") from error
                raise StoreBroken(f"transfer of {location.nbytes} bytes in {str(self.directory)!r}: {error}") from error
            if moved <= 0 or moved % file.alignment:
                asked = sum(length for _, length in batch)
                raise ShortTransfer(f"{moved} of {asked} bytes moved in {str(self.directory)!r}")
            offset += moved
            while moved and pieces:
                address, length = pieces[0]
                step = min(moved, length)
                moved -= step
                if step == length:
                    pieces.pop(0)
                else:
                    pieces[0] = (address + step, length - step)

    def _blocks(self, block: int) -> tuple[int, mmap.mmap]:
        """Two aligned blocks of this worker's own, for head and tail: (address, what keeps them)."""
        kept: tuple[int, mmap.mmap] | None = getattr(self._local, "blocks", None)
        if kept is None:
            memory = mmap.mmap(-1, align_up(2 * block, mmap.PAGESIZE))
            kept = self._local.blocks = (ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory)
        return kept

    def _reserve(self, file: ScratchFile, end: int) -> None:
        """Lay out the file up to `end`. Raises StoreFull."""
        if end <= self._reserved_bytes:
            return
        with self._lock:
            start = self._reserved_bytes
            if end <= start:
                return
            target = align_up(end, GROWTH_BYTES)
            for stop in (target, end):  # what is needed now, where the disk has no room for more
                try:
                    self._lay_out(file, start, stop)
                    break
                except OSError as error:
                    if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                        stop = target  # the file system lays files out as they are written
                        break
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise StoreBroken(f"cannot lay out a file in {str(self.directory)!r}: {error}") from error
                    if stop == end:
                        raise StoreFull(f"no space left in {str(self.directory)!r}: {error}") from error
            self._reserved_bytes = stop

    def _lay_out(self, file: ScratchFile, start: int, stop: int) -> None:
        while True:
            try:
                return self._syscalls.fallocate(file.fd, start, stop - start)
            except InterruptedError:  # a signal for the program, which this thread happened to get
                continue

    # -- with the lock -------------------------------------------------------------------------------------------

    def _free(self, ticket: Ticket) -> None:
        location, ticket.location = ticket.location, None
        if location is not None:  # discarded twice while it was running
            self._extents.free(location.offset, location.length)

    def _free_orphans(self) -> None:
        if self._orphans:
            running = []
            for ticket in self._orphans:  # one look at each: it may end between two
                if ticket.done():
                    self._free(ticket)
                else:
                    running.append(ticket)
            self._orphans = running

    def _close_file(self) -> None:
        self._file = None
        with suppress(IndexError):
            self._syscalls.close(self._descriptors.pop())


# -- fork --------------------------------------------------------------------------------------------------------------

_stores: weakref.WeakSet[PosixStore] = weakref.WeakSet()
_held = ExitStack()


def _before_fork() -> None:
    for store in list(_stores):
        _held.enter_context(store._workers.held())


def _after_fork_in_parent() -> None:
    _held.close()


def _after_fork_in_child() -> None:
    _held.pop_all()  # the locks belong to threads that do not exist here
    for store in list(_stores):
        store._closed = True
        store._lock = threading.Lock()  # another thread may have held it
        store._workers.forget()
        store._close_file()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
