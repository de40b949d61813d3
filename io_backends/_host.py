"""HostStore: bytes stay in host memory, in the memory they came in or in an arena.

Two modes, by who else uses the memory:

- Without an arena, `write` keeps the buffer's owner instead of copying. For what a device has copied out already, into
  memory that nobody else has: `before` (a wait for the device) runs on the worker, so that the source can be freed the
  moment the copy has arrived.
- With one, bytes are copied into it, as for memory that the caller edits or uses again, and only buffers that are
  `given` are kept as they are.

Either way the location of a finished write *is* a `Buffer`, so whoever knows this may use the memory in place, for as
long as it holds the owner: a lease of the arena outlives the discard of its write until nobody reads it any more.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable

from ._arena import HostArena
from ._errors import StoreError, StoreFull
from ._store import Buffer, Ticket
from ._workers import Workers


class HostStore:
    """A `Store` whose locations are buffers.

    Args:
        threads: workers; they copy and wait for devices.
        budget_bytes: what may be stored at once, given memory included; a write beyond it fails with `StoreFull`.
        arena: where to copy to; closed with the store. It has a budget of its own.
        timeout_s: a wait fails when nothing has ended for so long; None for never.
    """

    alignment = 1

    def __init__(
        self,
        *,
        threads: int = 1,
        budget_bytes: int | None = None,
        arena: HostArena | None = None,
        timeout_s: float | None = 60.0,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._arena = arena
        self._lock = threading.Lock()
        self._bytes = 0
        self._given_back: deque[int] = deque()  # bytes of discarded writes, still to be taken off `_bytes`
        self._workers = Workers(threads, "tba-host", lambda: None, on_forked=self._forget, timeout_s=timeout_s)

    def write(
        self,
        buffer: Buffer,
        *,
        on_done: Callable[[Ticket], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> Ticket:
        reserved = self._reserve(buffer.nbytes)
        ticket = _HostTicket(buffer, None, self._store if reserved else self._refuse, on_done, before)
        if reserved:
            ticket.held_bytes = buffer.nbytes
        try:
            self._workers.submit(ticket, urgent=False)
        except StoreError:
            self.discard(ticket)
            raise
        return ticket

    def keeps(self, buffer: Buffer) -> bool:
        """Whether what is stored of `buffer` stays as it is, whatever the caller does with that memory later."""
        return self._arena is not None or buffer.given

    def read(
        self,
        location: Buffer | None,
        buffer: Buffer,
        *,
        on_done: Callable[[Ticket], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> Ticket:
        if location is None:
            raise ValueError("asked to read what is not there: the write has not ended well, or was discarded")
        if buffer.nbytes != location.nbytes:
            raise ValueError(f"asked to read {location.nbytes} bytes into a buffer of {buffer.nbytes}")
        ticket = Ticket(buffer, location, _fetch, on_done, before)
        self._workers.submit(ticket, urgent=True)
        return ticket

    def discard(self, ticket: Ticket) -> None:
        # No lock: a finaliser may call this while its own thread holds it.
        ticket.cancel()
        held_bytes = vars(ticket).pop("held_bytes", 0)
        if held_bytes:
            self._given_back.append(held_bytes)
        vars(ticket)["discarded"] = True
        ticket.location = None  # and `_store`, which sets it, looks at `discarded` afterwards

    def allocated_bytes(self) -> int:
        """Bytes stored, given memory included."""
        with self._lock:
            return self._stored_bytes()

    def trim(self) -> None:
        """Once a step: give back memory of the arena that the last one did not use."""
        if self._arena is not None:
            self._arena.trim()

    def close(self) -> None:
        self._workers.stop()
        self._workers.join()
        if self._arena is not None:
            self._arena.close()

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
        buffer = ticket.buffer
        assert buffer is not None
        if self._arena is None or buffer.given:
            ticket.location = buffer
        else:
            _, copy = self._arena.lease(buffer.nbytes, buffer.address % self._arena.alignment)
            ctypes.memmove(copy.address, buffer.address, buffer.nbytes)
            ticket.location = copy
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


class _HostTicket(Ticket):
    """A write, and how many bytes of the budget it holds until it is discarded."""

    held_bytes: int


def _fetch(ticket: Ticket) -> None:
    source, target = ticket.location, ticket.buffer
    assert target is not None
    ctypes.memmove(target.address, source.address, source.nbytes)
    ticket.moved_bytes = ticket.nbytes
