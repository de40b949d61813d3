"""Store: the protocol of a place for bytes, and `Ticket`, one transfer under way.

Guarantees every store gives (`io_backends.testing` holds stores to them):

1. `write` and `read` return at once; the work happens on a thread of the store.
2. A ticket keeps its buffer's owner alive until the transfer has ended, and no longer.
3. A transfer either moves every byte or ends with an error that `wait` raises.
4. `on_done` runs once, on the thread that ended the transfer, before any waiter wakes; not for a cancelled one.
5. `discard` may be called at any time: a location is reused only when nothing is written to it any more.

Assumption beneath them: whoever submits a buffer does not free its memory by other means than dropping the owner.
"""

from __future__ import annotations

import enum
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ._errors import StoreBroken, StoreError, TransferCancelled


class Buffer(NamedTuple):
    """Plain memory to transfer from or into.

    `owner` is any object whose life keeps the memory valid. `padded` promises that the whole aligned blocks around
    `[address, address + nbytes)` belong to the buffer too, so that a direct read may overwrite them.
    """

    address: int
    nbytes: int
    owner: object
    padded: bool = False


class Location(NamedTuple):
    """Where a write went. `skew` is the address modulo the store's alignment: read into a buffer with the same skew."""

    offset: int
    length: int
    nbytes: int
    skew: int


class TicketState(enum.Enum):
    """Life of a transfer."""

    QUEUED = enum.auto()  # from submission until a worker takes it
    RUNNING = enum.auto()  # a worker is moving bytes
    DONE = enum.auto()  # every byte moved
    FAILED = enum.auto()  # ended with `error`
    CANCELLED = enum.auto()  # taken back before it started


class Ticket:
    """One transfer: wait for it, cancel it before it starts, learn its error.

    Attributes:
        nbytes: bytes asked to move.
        location: where a write goes or a read comes from.
        moved_bytes: physical bytes moved, padding included (0 until done).
        started_s, ended_s: `time.perf_counter()` around the transfer, for timelines.
        error: the exception that ended it, or None.
    """

    __slots__ = (
        "_before",
        "_event",
        "_lock",
        "_on_done",
        "_work",
        "buffer",
        "ended_s",
        "error",
        "location",
        "moved_bytes",
        "nbytes",
        "started_s",
        "state",
    )

    def __init__(
        self,
        buffer: Buffer,
        location: Any,
        work: Callable[[Ticket], None],
        on_done: Callable[[Ticket], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.buffer: Buffer | None = buffer
        self.nbytes = buffer.nbytes
        self.location = location
        self.state = TicketState.QUEUED
        self.error: BaseException | None = None
        self.moved_bytes = 0
        self.started_s = 0.0
        self.ended_s = 0.0
        self._work: Callable[[Ticket], None] | None = work
        self._on_done = on_done
        self._before = before
        self._lock = threading.Lock()
        self._event: threading.Event | None = None  # made by the first waiter: most transfers have none

    def done(self) -> bool:
        """Whether the transfer has ended, well or not."""
        return self.state in _ENDED

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the transfer has ended; False if `timeout_s` passed first. Raises the transfer's error."""
        if self.state not in _ENDED:
            with self._lock:
                if self._event is None:
                    self._event = threading.Event()
                    if self.state in _ENDED:
                        self._event.set()
            if not self._event.wait(timeout_s):
                return False
        if self.state is TicketState.FAILED:
            assert self.error is not None
            raise self.error
        if self.state is TicketState.CANCELLED:
            raise TransferCancelled(f"the transfer of {self.nbytes} bytes was cancelled before it started")
        return True

    def cancel(self) -> bool:
        """Take the transfer back; True if it had not started (its buffer is released then), else False."""
        with self._lock:
            if self.state is not TicketState.QUEUED:
                return False
            self.state = TicketState.CANCELLED
            self.buffer = self._work = self._on_done = self._before = None
            if self._event is not None:
                self._event.set()
            return True

    def start(self) -> bool:
        """For stores: a worker takes the ticket; False when it was cancelled meanwhile."""
        with self._lock:
            if self.state is not TicketState.QUEUED:
                return False
            self.state = TicketState.RUNNING
            return True

    def run(self, clock: Callable[[], float]) -> None:
        """For stores: do the work on this thread, then `finish`. Never raises: what fails is carried by the ticket."""
        work, before = self._work, self._before
        assert work is not None
        try:
            if before is not None:
                before()
            self.started_s = clock()
            work(self)
        except BaseException as error:  # a worker carries every error, even SystemExit, to whoever waits
            self.error = error if isinstance(error, StoreError) else _broken(error)
            _let_go(error)
        self.ended_s = clock()
        self.finish()

    def finish(self) -> None:
        """For stores: end a started transfer according to `error`: callback, then waiters, then the buffer goes."""
        on_done, self._on_done, self._work, self._before = self._on_done, None, None, None
        if on_done is not None:
            try:
                on_done(self)
            except BaseException as error:
                self.error = self.error or _broken(error)
        self.buffer = None
        with self._lock:
            self.state = TicketState.DONE if self.error is None else TicketState.FAILED
            if self._event is not None:
                self._event.set()


_ENDED = frozenset({TicketState.DONE, TicketState.FAILED, TicketState.CANCELLED})


def _broken(cause: BaseException) -> StoreBroken:
    error = StoreBroken(f"a transfer failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _let_go(error: BaseException) -> None:
    """Keep a failed transfer's traceback but not the locals of its frames: they hold the buffer's owner."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # the first frame is `run`, which is still running
    chained: BaseException | None = error
    while chained is not None:
        traceback.clear_frames(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__


class Store(Protocol):
    """A place for bytes. Thread-safe."""

    @property
    def alignment(self) -> int:
        """Bytes: a read into a padded buffer whose address equals the write's modulo this needs no copy."""

    def write(
        self,
        buffer: Buffer,
        *,
        on_done: Callable[[Ticket], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> Ticket:
        """Queue a write. `before`, if given, runs on the worker just ahead of the transfer (it may wait for a device).

        Raises `StoreClosed`; everything else is carried by the ticket. The ticket's `location` is valid from now on.
        """

    def read(
        self,
        location: Any,
        buffer: Buffer,
        *,
        on_done: Callable[[Ticket], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> Ticket:
        """Queue a read of a finished write into `buffer`, whose size is the write's. Goes ahead of queued writes."""

    def discard(self, ticket: Ticket) -> None:
        """Give back the space of a write, cancelling it if it has not started. Idempotent; never blocks."""

    def allocated_bytes(self) -> int:
        """Blocks the store occupies now (disk blocks for a file), in bytes."""

    def close(self) -> None:
        """End the workers and give everything back. Idempotent. Queued transfers fail with `StoreClosed`."""

    def abandon(self) -> None:
        """`close` without waiting, for finalisers: safe on any thread at any bytecode. Idempotent."""
