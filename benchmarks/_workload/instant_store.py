"""InstantStore: completes every transfer at once and moves no bytes, so that a step costs what the engine costs."""

from __future__ import annotations

import time
from typing import Any

from io_backends import Buffer, Location, Store, Ticket


class InstantStore(Store):
    """A `Store` that discards what it is given; a read leaves its buffer unchanged. So gradients are meaningless."""

    @property
    def alignment(self) -> int:
        return 512  # a disk's, so that buffers are laid out as for one

    def submit_write(self, buffer: Buffer, on_done: Any, before: Any) -> Ticket:
        location = Location(0, buffer.nbytes, buffer.nbytes, buffer.address % self.alignment)
        return _ended(Ticket(buffer, location, _nothing, on_done, before))

    def submit_read(self, location: Any, buffer: Buffer, on_done: Any, before: Any) -> Ticket:
        return _ended(Ticket(buffer, location, _nothing, on_done, before))

    def discard(self, ticket: Ticket) -> None:
        ticket.cancel()

    def allocated_bytes(self) -> int:
        return 0

    def close(self) -> None: ...

    def abandon(self) -> None: ...


def _nothing(ticket: Ticket) -> None:
    ticket.moved_bytes = ticket.nbytes


def _ended(ticket: Ticket) -> Ticket:
    ticket.start()
    ticket.run(time.perf_counter)
    return ticket
