"""HostStore: bytes stay in the host memory they were handed over in.

For what a device has copied out already: `write` keeps the buffer's owner instead of copying, and its location *is*
that buffer, so whoever knows this may use the memory in place. `before` (a wait for the device) runs on the worker,
so that the source can be freed the moment the copy has arrived.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from ._store import Buffer, Ticket
from ._workers import Workers


class HostStore:
    """A `Store` whose locations are the buffers themselves."""

    alignment = 1

    def __init__(self, *, threads: int = 1) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        self._workers = Workers(threads, "tba-host", lambda: None)

    def write(
        self,
        buffer: Buffer,
        *,
        on_done: Callable[[Ticket], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> Ticket:
        ticket = Ticket(buffer, buffer, _moved, on_done, before)
        self._workers.submit(ticket, urgent=False)
        with self._lock:
            self._bytes += buffer.nbytes
        return ticket

    def read(
        self,
        location: Buffer,
        buffer: Buffer,
        *,
        on_done: Callable[[Ticket], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> Ticket:
        if buffer.nbytes != location.nbytes:
            raise ValueError(f"asked to read {location.nbytes} bytes into a buffer of {buffer.nbytes}")

        def copy(ticket: Ticket) -> None:
            ctypes.memmove(buffer.address, location.address, location.nbytes)
            _moved(ticket)

        ticket = Ticket(buffer, location, copy, on_done, before)
        self._workers.submit(ticket, urgent=True)
        return ticket

    def discard(self, ticket: Ticket) -> None:
        ticket.cancel()
        with self._lock:
            if ticket.location is not None:
                self._bytes -= ticket.nbytes
                ticket.location = None

    def allocated_bytes(self) -> int:
        return self._bytes

    def close(self) -> None:
        self._workers.stop()
        self._workers.join()

    def abandon(self) -> None:
        self._workers.stop()


def _moved(ticket: Ticket) -> None:
    ticket.moved_bytes = ticket.nbytes
