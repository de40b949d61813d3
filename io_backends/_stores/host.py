"""HostStore: bytes stay where they are in host memory.

`write` keeps the buffer's owner instead of copying. It is for bytes that a device has already copied into memory with
no other user (`Buffer.given`); such a write ends at once on the submitting thread if it has nothing to wait for.

The location of a finished write is a `Buffer`: its memory may be used in place while its owner is held, even after the
write is discarded.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque

from .._buffer import Buffer
from .._errors import StoreError, StoreFull
from .._store import Store
from .._ticket import Before, OnDone, Ticket
from .._workers.workers import Workers


class _Write(Ticket):
    """A write with the budget bytes that it holds until discarded: whoever pops them from its dict frees them."""

    held_bytes: int


class HostStore(Store):
    """A `Store` whose locations are buffers.

    Args:
        threads: workers, which wait for devices and copy what is read.
        budget_bytes: most that may be stored at once; a write beyond it fails with `StoreFull`. None for no limit.
        timeout_s: a wait fails if nothing has ended for this long; None for never.
    """

    def __init__(self, *, threads: int = 1, budget_bytes: int | None = None, timeout_s: float | None = 60.0) -> None:
        self.budget_bytes = self._first_bytes = budget_bytes
        self._lock = threading.Lock()
        self._bytes = 0
        self._given_back: deque[int] = deque()  # bytes of discarded writes, to be subtracted from `_bytes`
        self._workers = Workers(threads, "tba-host", lambda: None, on_forked=self._forget, timeout_s=timeout_s)

    def submit_write(self, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        reserved = self._reserve(buffer.nbytes)
        ticket = _Write(buffer, None, self._store if reserved else self._refuse, on_done, before)
        ticket.held_bytes = buffer.nbytes * reserved
        try:
            if buffer.given and before is None:
                self._workers.refuse()
                ticket.run_here()
                return ticket
            return self._workers.submit(ticket, urgent=False)
        except StoreError:
            self.discard(ticket)
            raise

    def submit_read(self, location: Buffer, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        return self._workers.submit(Ticket(buffer, location, _fetch, on_done, before), urgent=True)

    def discard(self, ticket: Ticket) -> None:
        # No lock: a finalizer may call this while its own thread holds the lock.
        ticket.cancel()
        if not isinstance(ticket, _Write):
            return
        held_bytes = vars(ticket).pop("held_bytes", 0)
        if held_bytes:
            self._given_back.append(held_bytes)
        vars(ticket)["discarded"] = True
        ticket.location = None  # `_store` sets it, then checks `discarded`

    @property
    def capacity_bytes(self) -> int | None:
        return self.budget_bytes

    def resize(self, share: float) -> None:
        if self._first_bytes is not None:
            self.budget_bytes = int(share * self._first_bytes)

    def allocated_bytes(self) -> int:
        with self._lock:
            return self._stored_bytes()

    def resident(self, location: Buffer | None) -> Buffer | None:
        return location

    def close(self) -> None:
        self._workers.stop()
        self._workers.join()

    def abandon(self) -> None:
        self._workers.stop()

    def _reserve(self, nbytes: int) -> bool:
        with self._lock:
            if self.budget_bytes is not None and self._stored_bytes() + nbytes > self.budget_bytes:
                return False
            self._bytes += nbytes
            return True

    def _stored_bytes(self) -> int:
        while self._given_back:
            self._bytes -= self._given_back.popleft()
        return self._bytes

    def _store(self, ticket: Ticket) -> None:
        ticket.location = ticket.buffer
        if vars(ticket).get("discarded"):
            ticket.location = None
        ticket.moved_bytes = ticket.nbytes

    def _refuse(self, ticket: Ticket) -> None:
        raise StoreFull(
            f"a write of {ticket.nbytes} bytes does not fit into host memory: its budget is {self.budget_bytes} bytes, "
            f"{self.allocated_bytes()} of them in use; raise the budget or discard writes"
        )

    def _forget(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it


def _fetch(ticket: Ticket) -> None:
    source, target = ticket.location, ticket.buffer
    assert target is not None
    ctypes.memmove(target.address, source.address, source.nbytes)
    ticket.moved_bytes = ticket.nbytes
