"""FileStore: what stores over one scratch file share: the file's life, its space, its workers.

Guarantees:

1. The first transfer makes the file, once. It is closed once: by the last worker, by `close`, or in a forked child.
2. Once the store is closed or all workers have died, no file is made again.
3. After a fork the child owns none of it; every call raises StoreClosed.

Where threads meet: `open` and `abandon`, which takes no lock. `open` (1) makes the file, (2) appends it to `_files`,
(3) checks `_closed`. `abandon` (a) sets `_closed`; the last worker then (b) pops the file and closes it. If (a) is
before (3), `open` closes the file itself; else (2) was before (b), and the worker finds it. If both try, `pop` gives it
to one of them.
"""

from __future__ import annotations

import abc
import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from .. import interrupts
from .._buffer import Buffer, Location
from .._errors import ShortTransfer, StoreBroken, StoreClosed, StoreFull
from .._file import layout
from .._file.layout import Piece
from .._file.rate import RateLimit
from .._file.scratch import ScratchFile, after_collection, lacks_descriptors, open_scratch
from .._file.space import Space, extent_of
from .._file.syscalls import Pieces, Syscalls
from .._store import Store
from .._ticket import Before, OnDone, Ticket
from .._workers.workers import Workers

# The most that one system call moves, so that waiters see a huge tensor on a slow disk making progress.
_CALL_BYTES = 64 << 20


class _Open(Protocol):
    @property
    def fd(self) -> int: ...


File = TypeVar("File", bound=_Open)


class FileStore(Store, Generic[File]):
    """A `Store` except for how bytes move (`_write`, `_read`) and what the file is (`_make`, `_release`)."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        name: str,
        *,
        threads: int,
        capacity_bytes: int | None,
        timeout_s: float | None,
        syscalls: Syscalls | None,
        device: int | None,
    ) -> None:
        self.directory = Path(directory)
        self._device = device
        self._syscalls = syscalls or Syscalls()
        self._file: File | None = None
        self._files: list[File] = []  # the same one, until an atomic `pop` hands it to whoever closes it
        self._closed = False
        self._lock = threading.Lock()  # while the file is made
        self._space = Space(str(self.directory), self._syscalls, capacity_bytes)
        self._workers = Workers(threads, name, self._close_file, on_forked=self._forget, timeout_s=timeout_s)

    @abc.abstractmethod
    def _make(self) -> File:
        """Make a new scratch file. Raises StoreBroken."""

    @abc.abstractmethod
    def _release(self, file: File) -> None:
        """Close the file."""

    @abc.abstractmethod
    def _write(self, ticket: Ticket) -> None:
        """On a worker: set the ticket's location and move its bytes."""

    @abc.abstractmethod
    def _read(self, ticket: Ticket) -> None:
        """On a worker: move the bytes of the ticket's location."""

    def open(self) -> File:
        """The scratch file, made on the first call. Raises StoreBroken, StoreClosed."""
        file = self._file
        if file is None:
            if not self._closed:
                self._workers.refuse()  # if all workers have died, they have closed the file for good
            try:
                file = self._open()
            except StoreBroken as error:
                if not lacks_descriptors(error):
                    raise
                file = self._open_after_collection(error)
            if file is None:
                raise StoreClosed(f"the store on {str(self.directory)!r} is closed; make a new one")
        return file

    def _open(self) -> File | None:
        """Make the file unless another thread has. None once closed."""
        with self._lock:
            file = self._file
            if file is None and not self._closed:
                file = self._file = self._make()
                self._files.append(file)
                if self._closed:  # by `abandon`, before there was a file to close
                    self._close_file()
                    file = None
        return file

    def _open_after_collection(self, failure: StoreBroken) -> File | None:
        """Retry while collections free descriptors. Raises `failure`. Not under the lock: finalizers run here."""
        for _ in after_collection():
            try:
                return self._open()
            except StoreBroken as error:
                if not lacks_descriptors(error):
                    raise
        raise failure

    def submit_write(self, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        return self._workers.submit(Ticket(buffer, None, self._write, on_done, before), urgent=False)

    def submit_read(self, location: Location, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        return self._workers.submit(Ticket(buffer, location, self._read, on_done, before), urgent=True)

    def discard(self, ticket: Ticket) -> None:
        if ticket.location is None:  # a worker sets it as the write begins: there is nothing to cancel any more
            ticket.cancel()
        self._space.discard(ticket)

    def trim(self) -> None:
        allocated_bytes = self.allocated_bytes()
        if allocated_bytes and self._space.begin_trim(allocated_bytes):
            with suppress(StoreClosed, StoreBroken):  # then everything is given back anyway
                self._workers.submit(Ticket(Buffer(0, 0, None), None, self._punch), urgent=False)

    def allocated_bytes(self) -> int:
        file = self._file
        if file is None or self._closed:
            return 0
        tracer = interrupts.tracer()
        try:
            nbytes = self._syscalls.allocated(file.fd)
        except OSError as error:  # the last worker has closed it since
            interrupts.pass_on(error, tracer)
            return 0
        return nbytes if file is self._file else 0  # else the descriptor may be another file's by now

    @property
    def capacity_bytes(self) -> int | None:
        return self._space.capacity_bytes

    def resize(self, share: float) -> None:
        self._space.resize(share)

    @property
    def used_bytes(self) -> int:
        return self._space.used_bytes

    def close(self) -> None:
        """End the workers and close the file. Idempotent.

        Running transfers end first; queued ones fail with `StoreClosed`. If a transfer hangs in the system, this
        returns after `timeout_s`, and the file is closed when the transfer ends.
        """
        self._closed = True
        self._workers.stop()
        self._workers.join()
        if self._workers.ended:
            self._close_file()  # one made while the last worker ended

    def abandon(self) -> None:
        """`close` without waiting; safe in a finalizer, on any thread. The last worker closes the file."""
        self._closed = True
        self._workers.stop()

    def _open_scratch(self) -> ScratchFile:
        return open_scratch(str(self.directory), self._syscalls, self._device)

    def _place(self, ticket: Ticket, fd: int, block: int, checksum: int | None = None) -> Location:
        """On a worker: take and lay out an extent for a write. As soon as the ticket has it, `discard` frees it."""
        location = extent_of(ticket, block)
        if location.length:
            location = location._replace(offset=self._space.take(location.length), checksum=checksum)
        ticket.location = location
        self._space.reserve(fd, location.offset + location.length)
        return location

    def _move(
        self,
        call: Callable[[int, Pieces, int], int],
        fd: int,
        block: int,
        pieces: list[Piece],
        location: Location,
        begin: int = 0,
        limit: RateLimit | None = None,
    ) -> None:
        """Move all bytes of `pieces` to or from an extent, starting at `begin`, in as many system calls as needed.

        Direct I/O cannot resume within a `block`.
        """
        offset, left = location.offset + begin, sum([length for _, length in pieces])
        most = _CALL_BYTES if limit is None else limit.piece_bytes
        while left:
            batch, asked = (pieces, left) if left <= most else (layout.first(pieces, most), most)
            if limit is not None:
                limit.pace(asked)
            try:
                moved = call(fd, batch, offset)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise StoreFull(f"no space left in {str(self.directory)!r}: {error}") from error
                raise StoreBroken(f"transfer of {location.nbytes} bytes in {str(self.directory)!r}: {error}") from error
            if moved <= 0 or moved % block:
                raise ShortTransfer(f"{moved} of {asked} bytes moved in {str(self.directory)!r}")
            self._workers.moved_s = time.perf_counter()
            offset += moved
            left -= moved
            if left:
                pieces = layout.rest(pieces, moved)

    def _punch(self, _: Ticket) -> None:
        self._space.punch(self.open().fd)

    def _forget(self) -> None:
        self._closed = True
        self._lock = threading.Lock()  # another thread may have held it
        self._space.forget()
        self._close_file()

    def _close_file(self) -> None:
        self._file = None
        with suppress(IndexError):
            self._release(self._files.pop())
