"""PosixStore: one nameless scratch file, direct I/O if available, several workers.

Guarantees beyond those of `Store`:

1. Most of a buffer is not copied: its aligned middle goes straight between memory and file; head and tail (less than a
   block each) go through the worker's own blocks in the same system call (`_file.layout`).
2. If all workers are busy, queued writes go together (`_file.batch_writer`), as each system call costs CPU time that
   training needs. One transfer is never split among workers: for 16 to 256 MiB and two workers, splitting made neither
   writes nor reads faster (0.97 to 1.05 of the time) and took as much CPU.
3. Space is reused: the file grows to the most that is stored at once, not to all that was ever written, and `trim`
   shrinks it.
4. Nothing is left on disk when the process ends, however it ends (`_file.scratch`).
5. After a fork the child owns none of it: its descriptor is closed, and every call raises StoreClosed.
6. A successful read returns what was written. With `checksum` it errs once in 2**64; without, it detects 4 KiB pages
   that were lost, torn or misplaced, but not a change within a page (`_file.checksum`).

Assumption: the submitter checks that memory was not edited during the transfer (the engine does), because the copy may
be torn then.

The submitting thread only makes and queues a ticket. The worker decides where the bytes go.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from .._buffer import Buffer, Location
from .._errors import Corrupted
from .._extents import align_up
from .._file import checksum as checksums
from .._file import layout
from .._file.batch_writer import BatchWriter
from .._file.layout import Vector
from .._file.rate import RateLimit
from .._file.scratch import ScratchFile
from .._file.syscalls import Syscalls
from .._ticket import Before, OnDone, Ticket
from .file_store import FileStore

_BOUNCE_BYTES = 1 << 20  # pieces of reads into memory of another skew, which are copied


class _Memory(threading.local):
    """Each worker's own aligned memory."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[mmap.mmap, int]] = {}

    def of(self, nbytes: int) -> int:
        """Address of `nbytes` bytes, page-aligned: one piece of memory per size."""
        if nbytes not in self._kept:
            memory = mmap.mmap(-1, align_up(nbytes, mmap.PAGESIZE))
            self._kept[nbytes] = memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return self._kept[nbytes][1]


class PosixStore(FileStore[ScratchFile]):
    """A `Store` on a file system.

    Args:
        directory: an existing, writable directory.
        threads: workers.
        checksum: hash every byte written instead of a sample, and verify reads; a difference raises `Corrupted`.
        capacity_bytes: most that may be stored at once; a write beyond it fails with `StoreFull`. None: what the disk
            has.
        write_rate_bytes_per_s, read_rate_bytes_per_s: limits, for experiments with slow links.
        timeout_s: a wait fails with `StoreStalled` if no byte has moved for this long; None for never.
        syscalls: replaced in tests.
        device: `st_dev` of the file system that the directory was on when it was checked; no other is used.

    Raises:
        StoreBroken: no scratch file can be made there. The first transfer makes the file; `open()` makes it now.
        ImportError: `checksum` without the package xxhash.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        threads: int = 2,
        checksum: bool = False,
        capacity_bytes: int | None = None,
        write_rate_bytes_per_s: float | None = None,
        read_rate_bytes_per_s: float | None = None,
        timeout_s: float | None = 60.0,
        syscalls: Syscalls | None = None,
        device: int | None = None,
    ) -> None:
        super().__init__(
            directory,
            "tba-io",
            threads=threads,
            capacity_bytes=capacity_bytes,
            timeout_s=timeout_s,
            syscalls=syscalls,
            device=device,
        )
        self._digest = checksums.every_byte() if checksum else checksums.sampled
        self._write_limit = RateLimit(write_rate_bytes_per_s) if write_rate_bytes_per_s is not None else None
        self._read_limit = RateLimit(read_rate_bytes_per_s) if read_rate_bytes_per_s is not None else None
        self._memory = _Memory()
        if write_rate_bytes_per_s is None:
            self._workers.batch_writer = BatchWriter(
                self.open, self._space, self._syscalls, self._memory.of, self._digest
            )

    @property
    def alignment(self) -> int:
        return (self._file or self.open()).alignment

    def submit_write(self, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        if self._file is None:
            self.open()
        return super().submit_write(buffer, on_done, before)

    # -- on the workers ------------------------------------------------------------------------------------------

    def _write(self, ticket: Ticket) -> None:
        file, buffer = self._file or self.open(), ticket.buffer
        assert buffer is not None
        checksum = self._digest(buffer.address, buffer.nbytes) if buffer.nbytes and not buffer.shared else None
        location = self._place(ticket, file.fd, file.alignment, checksum)
        if not location.length:
            return
        pieces, edges = self._vector(file, buffer, location)
        for inside, outside, nbytes in edges:
            ctypes.memmove(inside, outside, nbytes)
        self._move(self._syscalls.pwritev, file.fd, file.alignment, pieces, location, limit=self._write_limit)
        ticket.moved_bytes = align_up(location.skew + location.nbytes, file.alignment)

    def _read(self, ticket: Ticket) -> None:
        file, buffer, location = self._file or self.open(), ticket.buffer, ticket.location
        assert buffer is not None
        if not location.nbytes:
            return
        call, limit = self._syscalls.preadv, self._read_limit
        length = align_up(location.skew + location.nbytes, file.alignment)
        if buffer.address % file.alignment != location.skew:
            self._read_through_bounce(file, buffer, location, length)
        elif buffer.padded:
            self._move(call, file.fd, file.alignment, [(buffer.address - location.skew, length)], location, limit=limit)
        else:
            pieces, edges = self._vector(file, buffer, location)
            self._move(call, file.fd, file.alignment, pieces, location, limit=limit)
            for inside, outside, nbytes in edges:
                ctypes.memmove(outside, inside, nbytes)
        self._compare(buffer, location)
        ticket.moved_bytes = length

    def _read_through_bounce(self, file: ScratchFile, buffer: Buffer, location: Location, length: int) -> None:
        call, bounce = self._syscalls.preadv, self._memory.of(_BOUNCE_BYTES)
        for begin in range(0, length, _BOUNCE_BYTES):
            end = min(begin + _BOUNCE_BYTES, length)
            self._move(call, file.fd, file.alignment, [(bounce, end - begin)], location, begin, self._read_limit)
            first, last = layout.payload(begin, end, location.skew, location.nbytes)
            ctypes.memmove(buffer.address + first, bounce + first + location.skew - begin, last - first)

    def _vector(self, file: ScratchFile, buffer: Buffer, location: Location) -> Vector:
        block = file.alignment
        return layout.vector(buffer.address, location.skew, location.nbytes, block, self._memory.of(2 * block))

    def _compare(self, buffer: Buffer, location: Location) -> None:
        if location.checksum is None:
            return
        found = self._digest(buffer.address, buffer.nbytes)
        if found != location.checksum:
            raise Corrupted(
                f"{location.nbytes} bytes, read at offset {location.offset} of a file in {str(self.directory)!r}, have "
                f"checksum {found:016x}; they were written with {location.checksum:016x}: do not use them, and check "
                "memory and disk"
            )

    # -- the file ------------------------------------------------------------------------------------------------

    def _make(self) -> ScratchFile:
        return self._open_scratch()

    def _release(self, file: ScratchFile) -> None:
        self._syscalls.close(file.fd)
