"""Landing: what becomes of a record whose write has ended.

Guarantees:

1. A copy counts as finished only when it is certain that nobody edited the source meanwhile. The version counter is
   compared when the write ends; but an in-place kernel that is still running has not bumped it yet, and only a later
   look can tell. If the storage is ours alone nobody can be editing it. Otherwise the record is `unconfirmed` until
   a later hook of any thread (no operator of that thread runs then) or `flush`: a counter that has moved poisons it.
2. If the storage's address or size changed under the writer, the copy is worthless and the record becomes an alias
   again, which is what plain PyTorch has.
3. A failed write leaves the tensor in memory, and is told. One that the store calls off because we are closing it is
   not told: it has not failed.

Wants the engine's lock held. A write may land on the worker that ended it, while hooks of other threads wait for the
lock; nothing here waits, or runs code of the program's.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from io_backends import Store, StoreClosed, Ticket

from .._plan import policy
from .._record.record import IN_MEMORY, WRITING, Record
from .._stats import Counters
from .._torch.private import storage_use_count
from .copies import Unbegun
from .failures import Failures

MOVED = "storage resized or replaced before it was written"
CLOSED = "closed"
# A storage that only our alias (1) and the wrapper we look at it with (1) refer to.
_OURS_ALONE = 2


class Landing:
    """Gives back the memory of what was written, or takes back the write.

    Attributes:
        unconfirmed: written records whose sources are still to be looked at (guarantee 1).
        closing: whether the store is being closed by us.
    """

    def __init__(self, counters: Counters, failures: Failures) -> None:
        self.unconfirmed: list[weakref.ref[Record]] = []
        self.closing = False
        self._counters = counters
        self._failures = failures

    def settle(self, record: Record, ticket: Ticket, store: Store) -> None:
        """Settle what becomes of a record that is being written, now that its write has ended."""
        alias = record.alias
        assert alias is not None
        if record.was_moved():
            self._keep(record, store, MOVED)
        elif record.is_edited():
            record.poison()
        elif self.closing and isinstance(ticket.error, StoreClosed):
            self._keep(record, store, CLOSED)
        elif ticket.error is not None:
            self._keep(record, store, policy.NOT_WRITTEN)
            self._failures.not_written(record, ticket.error)
        elif (there := store.resident(ticket.location)) is not None and there.owner is alias:
            self._keep(record, store, policy.IN_HOST)  # the store keeps it where it is instead of copying
        elif record.wanted:
            record.stay()
        else:
            self._let_go(record, alias, None)

    def stage(self, record: Record, host: Tensor) -> bool:
        """Give back a device's memory, as the bytes are in `host`, and being written from there; False if it stays."""
        alias = record.alias
        if alias is None or record.state is not WRITING or record.was_moved() or record.is_edited():
            return False  # `settle` says what becomes of it
        self._let_go(record, alias, host)
        return True

    def settle_staged(self, record: Record, ticket: Ticket, store: Store) -> None:
        """Settle what becomes of a staged record whose write has ended."""
        if ticket.error is None:
            record.written()
            return
        record.unwritten()
        store.discard(ticket)
        if not (self.closing and isinstance(ticket.error, StoreClosed)):
            self._counters.kept_to_offloaded(record.set_offloaded(False), policy.NOT_WRITTEN)
            self._failures.not_written(record, ticket.error)

    def call_off(self, record: Record, store: Store) -> None:
        """Settle what becomes of a record whose copy is under way when the engine is closed."""
        self._keep(record, store, CLOSED)

    def not_begun(self, record: Record, error: BaseException, store: Store) -> None:
        """Settle what becomes of a record whose copy is over, and which the store did not take."""
        self._keep(record, store, policy.NOT_WRITTEN)
        self._failures.not_queued(error)

    def confirm(self) -> None:
        """Check, at a hook, whether anything written was edited before its copy was finished."""
        unconfirmed, self.unconfirmed = self.unconfirmed, []
        for reference in unconfirmed:
            record = reference()
            if record is None or record.alias is None or record.state in IN_MEMORY:
                continue
            if record.is_edited():
                record.poison()
            else:
                record.confirm()

    def take_back(self, record: Record, store: Store) -> None:
        """Make the record what it was in plain PyTorch, an alias: its write was cancelled, or is worthless."""
        ticket = record.take_back()
        if ticket is not None and not isinstance(ticket, Unbegun):
            store.discard(ticket)

    def _let_go(self, record: Record, alias: Tensor, staged: Tensor | None) -> None:
        storage = alias.untyped_storage()
        alone = storage_use_count(storage._cdata) <= _OURS_ALONE
        del storage
        record.store(confirmed=alone, staged=staged)
        if not alone:
            self.unconfirmed.append(record.ref)

    def _keep(self, record: Record, store: Store, reason: str) -> None:
        self.take_back(record, store)
        self._counters.kept_to_offloaded(record.set_offloaded(False), reason)
