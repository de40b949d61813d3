"""Ticket: one transfer in flight, to wait for, cancel and be called back by."""

from __future__ import annotations

import enum
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from . import interrupts
from ._buffer import Buffer
from ._errors import StoreBroken, StoreError, TransferCancelled, WaitEnded

_PERIOD_S = 0.25  # how often a waiter checks a ticket that no store has taken yet


class TicketState(enum.Enum):
    """Life of a transfer."""

    QUEUED = enum.auto()  # from submission until a worker takes it
    RUNNING = enum.auto()  # a worker is moving bytes
    DONE = enum.auto()  # every byte moved
    FAILED = enum.auto()  # ended with `error`
    CANCELLED = enum.auto()  # taken back before it started


# Module names, because reading a member off the enum class costs ten times as much.
QUEUED, RUNNING, DONE, FAILED, CANCELLED = TicketState
# A tuple compares members by identity; a set would call the enum's slow hash.
_ENDED = (DONE, FAILED, CANCELLED)
_CLAIMED: list[None] = []  # shared by all claimed tickets, always empty


class Watch(Protocol):
    """What moves a ticket's bytes, as seen by a waiter."""

    @property
    def period_s(self) -> float:
        """How often a waiter checks."""

    def check(self, ticket: Ticket, since_s: float) -> None:
        """Raise StoreError if waiting is pointless because nothing moves any more.

        `since_s` is when the wait began (`time.perf_counter()`).
        """


OnDone = Callable[["Ticket"], None] | None
Before = Callable[[], None] | None


class Ticket:
    """One transfer: wait for it, cancel it before it starts, learn its error.

    It needs no lock: the atomic `list.pop` decides who gets it, so a finalizer may cancel it at any bytecode. It has
    slots because it lives as long as what was written, and the garbage collector would also visit a dict.

    Attributes:
        nbytes: bytes to move.
        location: where a read comes from, or where a write went, known once it has succeeded.
        moved_bytes: physical bytes moved, padding included (0 until done).
        started_s, ended_s: `time.perf_counter()` around the transfer, for timelines.
        cpu_s: CPU seconds on the thread that ran it; a worker's since the ticket before.
        error: the exception that ended it, or None.
        state: where it is in its life.
        watch: who moves the bytes; set by the store.
    """

    __slots__ = (
        *("_before", "_event", "_on_done", "_unclaimed", "_work", "buffer", "cpu_s", "ended_s", "error", "location"),
        *("__weakref__", "moved_bytes", "nbytes", "started_s", "state", "watch"),
    )

    def __init__(
        self,
        buffer: Buffer,
        location: Any,
        work: Callable[[Ticket], None],
        on_done: OnDone = None,
        before: Before = None,
    ) -> None:
        self.buffer: Buffer | None = buffer
        self.nbytes = buffer.nbytes
        self.location = location
        self._work: Callable[[Ticket], None] | None = work
        self._on_done = on_done
        self._before = before
        self._unclaimed = [None]
        self._event: threading.Event | None = None  # made by the first waiter: most transfers have none
        self.state: TicketState = QUEUED
        self.error: BaseException | None = None
        self.moved_bytes = 0
        self.started_s = self.ended_s = self.cpu_s = 0.0
        self.watch: Watch | None = None

    @property
    def waits(self) -> bool:
        """For stores: whether the transfer must wait for something before it may begin."""
        return self._before is not None

    def done(self) -> bool:
        """Whether the transfer has ended, successfully or not."""
        return self.state in _ENDED

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the transfer has ended; False if `timeout_s` passed first.

        Raises:
            StoreError: what ended the transfer; or `StoreStalled`, with the transfer unfinished, if no byte of the
                store has moved for its timeout since this wait began.
        """
        if self.state not in _ENDED and not self._await_end(timeout_s):
            return False
        if self.state is FAILED:
            assert self.error is not None
            raise self.error
        if self.state is CANCELLED:
            raise TransferCancelled(f"the transfer of {self.nbytes} bytes was cancelled before it started")
        return True

    def _await_end(self, timeout_s: float | None) -> bool:
        event = self._event = self._event or threading.Event()  # if two threads race here, one polls by the period
        begun_s = time.perf_counter()
        while self.state not in _ENDED:  # read after setting the event; `finish` sets the state, then reads the event
            period_s = self.watch.period_s if self.watch is not None else _PERIOD_S
            if timeout_s is not None:
                period_s = min(period_s, max(0.0, begun_s + timeout_s - time.perf_counter()))
            if event.wait(period_s):
                break
            if interrupts.pending:
                interrupts.look()
            if interrupts.kept and interrupts.waiting():
                raise WaitEnded("a signal handler raised: this wait has ended, the transfer has not")
            if timeout_s is not None and time.perf_counter() - begun_s >= timeout_s:
                return False
            self.check(begun_s)
        return True

    def check(self, since_s: float) -> None:
        """Raise StoreError if waiting is pointless (see `Watch.check`)."""
        if self.watch is not None:
            self.watch.check(self, since_s)

    def cancel(self) -> bool:
        """Cancel the transfer and release its buffer; False if it has already started."""
        if self.state is not QUEUED or not self._claim():
            return False
        self.buffer = self._work = self._on_done = self._before = None
        self.state = CANCELLED
        if self._event is not None:
            self._event.set()
        return True

    def start(self) -> bool:
        """For stores: a worker takes the ticket; False if it was cancelled."""
        if not self._claim():
            return False
        self.state = RUNNING
        return True

    def _claim(self) -> bool:
        """Give the ticket to one of all callers of `start` and `cancel`."""
        try:
            self._unclaimed.pop()
        except IndexError:
            return False
        self._unclaimed = _CLAIMED
        return True

    def run(self, clock: Callable[[], float], begun_cpu_s: float | None = None) -> None:
        """For stores: do the work on this thread, then `finish`. Never raises: the ticket carries errors.

        `begun_cpu_s`: the thread's CPU time from which on it counts as the ticket's; None for now.
        """
        work, before = self._work, self._before
        assert work is not None
        begun_cpu_s = time.thread_time() if begun_cpu_s is None else begun_cpu_s
        try:
            if before is not None:
                before()
            self.started_s = clock()
            work(self)
        except BaseException as error:  # waiters get every error, even SystemExit
            self.error = error if isinstance(error, StoreError) else _broken(error)
            let_go(error)
        self.ended_s = clock()
        self.cpu_s = time.thread_time() - begun_cpu_s
        self.finish()

    def run_here(self) -> None:
        """For stores: do instant work on the submitting thread. Raises interrupts, which no worker could."""
        self.start()
        self.run(time.perf_counter)
        cause = None if self.error is None else self.error.__cause__
        if cause is not None and not isinstance(cause, Exception):
            raise cause

    def finish(self) -> None:
        """For stores: end a started transfer according to `error`: callback, then waiters; then the buffer goes."""
        on_done, self._on_done, self._work, self._before = self._on_done, None, None, None
        if on_done is not None:
            try:
                on_done(self)
            except BaseException as error:
                self.error = self.error or _broken(error)
        self.buffer = None
        self.state = DONE if self.error is None else FAILED
        if self._event is not None:
            self._event.set()

    def abort(self, error: StoreError) -> None:
        """For stores: end a ticket that no worker has, queued or running, with `error`, unless it has ended."""
        if self.state not in _ENDED and (self.state is RUNNING or self.start()):
            self.error = self.error or error
            self.finish()


def _broken(cause: BaseException) -> StoreBroken:
    error = StoreBroken(f"a transfer failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def let_go(error: BaseException) -> None:
    """Keep a failed transfer's traceback but clear its frames' locals, which hold the buffer's owner."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # the caller's frame is still running
    chained: BaseException | None = error
    while chained is not None:
        traceback.clear_frames(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
