"""Writes under way: from when the store has them until they have ended or were cancelled.

Wants the engine's lock held.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from io_backends import Ticket

from .._record.record import Record
from .daily_allowance import Allowance
from .staging import Staging


class WriteUnderWay(NamedTuple):
    """A write that the store has.

    Attributes:
        record: a weak reference to what is written.
        at_once: the store had nothing to move.
        staged: it is written from host memory, and the device's own is free.
    """

    record: weakref.ref[Record]
    at_once: bool
    staged: bool


class Writes:
    """The writes of one engine, which count as in flight from the copy ahead of them on (`depart`)."""

    def __init__(self, staging: Staging, allowance: Allowance) -> None:
        self._staging = staging
        self._allowance = allowance
        self._under_way: dict[Ticket, WriteUnderWay] = {}

    def begin(self, ticket: Ticket, record: Record, *, at_once: bool = False) -> WriteUnderWay:
        """Note that the store has the write of a record, or had nothing to move and ended it `at_once`."""
        write = self._under_way[ticket] = WriteUnderWay(record.ref, at_once, staged=False)
        return write

    def stage(self, ticket: Ticket) -> None:
        """Count the bytes of a write under way as in host memory: the device's is free."""
        self._under_way[ticket] = self._under_way[ticket]._replace(staged=True)
        self._staging.stage(ticket.nbytes)

    def end(self, ticket: Ticket) -> WriteUnderWay:
        """Count a write that has ended as no longer in flight."""
        write = self._under_way.pop(ticket)
        self._staging.land(ticket.nbytes, staged=write.staged)
        return write

    def cancel(self, ticket: Ticket) -> bool:
        """Cancel a write that is queued, or whose copy is under way; False if it is running or done."""
        if not ticket.cancel():
            return False
        write = self._under_way.pop(ticket, None)
        self._staging.land(ticket.nbytes, staged=write is not None and write.staged)
        self._allowance.give_back(ticket.nbytes)
        return True
