"""Landing: what happens to a record when its write has ended.

Guarantees:

1. A copy counts as finished only when it is certain that nobody edited the source meanwhile. The version counter is
   compared when the write ends; but an in-place kernel that is still running has not bumped it yet, and only a later
   check can tell. If the storage is ours alone, nobody can be editing it. Otherwise the record is `unconfirmed` until a
   later hook of any thread (no operator of that thread runs then) or `flush`: a moved counter poisons it.
2. If the storage's address or size changed under the writer, the copy is worthless and the record becomes an alias
   again, as in plain PyTorch.
3. A failed write leaves the tensor in memory and is reported. A write that the store cancels because we close it has
   not failed and is not reported.

Must be called with the engine's lock held. A write may land on the worker that ended it, while hooks of other threads
wait for the lock. Nothing here waits or runs the program's code.
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
_OURS_ALONE = 2  # references to a storage: our alias, and the wrapper used to count them


class Landing:
    """Frees the memory of what was written, or takes the write back.

    Attributes:
        unconfirmed: written records whose sources must still be checked (guarantee 1).
        closing: we are closing the store.
    """

    def __init__(self, counters: Counters, failures: Failures) -> None:
        self.unconfirmed: list[weakref.ref[Record]] = []
        self.closing = False
        self._counters = counters
        self._failures = failures

    def settle(self, record: Record, ticket: Ticket, store: Store) -> None:
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
        """Free a device's memory, because the bytes are in `host` and being written from there; False if it stays."""
        alias = record.alias
        if alias is None or record.state is not WRITING or record.was_moved() or record.is_edited():
            return False  # `settle` decides
        self._let_go(record, alias, host)
        return True

    def settle_staged(self, record: Record, ticket: Ticket, store: Store) -> None:
        """Settle what happens to a staged record whose write has ended."""
        if ticket.error is None:
            record.written()
            return
        record.unwritten()
        store.discard(ticket)
        if not (self.closing and isinstance(ticket.error, StoreClosed)):
            self._counters.kept_to_offloaded(record.set_offloaded(False), policy.NOT_WRITTEN)
            self._failures.not_written(record, ticket.error)

    def call_off(self, record: Record, store: Store) -> None:
        """The engine is closed during a record's copy."""
        self._keep(record, store, CLOSED)

    def not_begun(self, record: Record, error: BaseException, store: Store) -> None:
        """The store did not accept a record whose copy is over."""
        self._keep(record, store, policy.NOT_WRITTEN)
        self._failures.not_queued(error)

    def confirm(self) -> None:
        """At a hook, check whether anything written was edited before its copy was finished."""
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
        """Make the record an alias, as in plain PyTorch: its write was cancelled or is worthless."""
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
