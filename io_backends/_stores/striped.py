"""StripedStore: several stores, usually one per disk, used as one.

Guarantees beyond those of `Store`:

1. Each write goes whole to the store that will probably finish it first (`_stores.lanes`); its read goes there too.
2. A write that fails there has failed: no other store is tried. The failed store rests for a while, so a full or broken
   disk does not take writes that other disks could.

A write has an outer ticket for its user and an inner one of the chosen store. The inner one decides whether the write
can be cancelled, and may be discarded at any time; the outer one reports its outcome.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from .._buffer import Buffer
from .._store import Store
from .._ticket import Before, OnDone, Ticket
from .._workers.fork import ForkAware
from .lanes import Ended, Lane, choose


class StripedLocation(NamedTuple):
    """Where a write went: the store's index and the location in it. `skew` is the address modulo `alignment`."""

    store_index: int
    location: Any
    nbytes: int
    skew: int


class _Write(Ticket):
    """The outer ticket of a write in the store `index`."""

    inner: Ticket
    index: int
    lane: Lane
    discarded = False

    def cancel(self) -> bool:
        if not self.inner.cancel():
            return False
        self.lane.ended.append(Ended(time.perf_counter(), self.nbytes, moved=False, failed=False))
        return super().cancel()


class StripedStore(Store, ForkAware):
    """Several stores as one `Store`.

    Args:
        stores: at least one. This store owns them from now on and closes them.
    """

    alignment = 4096  # the largest of a file store's; asking the stores would open all files

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise ValueError("a striped store needs at least one store, got none")
        self.stores = tuple(stores)
        self._lanes = [Lane() for _ in stores]
        self._lock = threading.Lock()  # of the lanes
        self.heed_forks()

    def submit_write(self, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        ticket = _Write(buffer, None, lambda _: None, on_done)  # the inner ticket does the work
        now_s = time.perf_counter()
        with self._lock:
            index = choose(self._lanes, buffer.nbytes, now_s)
            self._lanes[index].begin(buffer.nbytes, now_s)
        ticket.index, ticket.lane = index, self._lanes[index]
        first = None if before is None else partial(_begin, ticket, before)
        try:
            inner = self.stores[index].write(buffer, on_done=partial(_ended, ticket), before=first)
        except BaseException:
            ticket.lane.ended.append(Ended(time.perf_counter(), buffer.nbytes, moved=False, failed=True))
            raise
        ticket.inner, ticket.watch = inner, inner.watch
        return ticket

    def submit_read(self, location: StripedLocation, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        store = self.stores[location.store_index]
        if buffer.padded and store.alignment > self.alignment:  # the padding may be too small
            buffer = buffer._replace(padded=False)
        return store.read(location.location, buffer, on_done=on_done, before=before)

    def discard(self, ticket: Ticket) -> None:
        ticket.cancel()
        if isinstance(ticket, _Write):
            ticket.discarded = True
            ticket.location = None  # `_ended` sets it, then checks `discarded`
            self.stores[ticket.index].discard(ticket.inner)

    def trim(self) -> None:
        for store in self.stores:
            store.trim()

    def allocated_bytes(self) -> int:
        return sum(store.allocated_bytes() for store in self.stores)

    @property
    def capacity_bytes(self) -> int | None:
        known = [store.capacity_bytes for store in self.stores]
        return sum(each or 0 for each in known) if None not in known else None

    def resize(self, share: float) -> None:
        for store in self.stores:
            store.resize(share)

    @property
    def used_bytes(self) -> int:
        return sum(store.used_bytes for store in self.stores)

    def resident(self, location: StripedLocation | None) -> Buffer | None:
        return None if location is None else self.stores[location.store_index].resident(location.location)

    def close(self) -> None:
        with ExitStack() as stack:
            for store in self.stores:
                stack.callback(store.close)
                store.abandon()  # so that all end concurrently

    def abandon(self) -> None:
        for store in self.stores:
            store.abandon()

    def forget(self) -> None:
        """In a forked child: replace the lock, which another thread may hold."""
        self._lock = threading.Lock()


def _begin(ticket: _Write, before: Callable[[], None]) -> None:
    """On a worker: start the outer ticket, then wait as `before` does."""
    ticket.start()
    before()


def _ended(ticket: _Write, inner: Ticket) -> None:
    ticket.inner = inner  # `on_done` may discard it before the submitter has set this
    ticket.start()  # unless `_begin` did
    failed = inner.error is not None
    ticket.lane.ended.append(
        Ended(inner.ended_s or time.perf_counter(), ticket.nbytes, moved=not failed, failed=failed)
    )
    if not failed:
        buffer = ticket.buffer
        assert buffer is not None
        skew = buffer.address % StripedStore.alignment
        ticket.location = StripedLocation(ticket.index, inner.location, ticket.nbytes, skew)
        if ticket.discarded:  # its space is free; in a host store the location is the memory itself
            ticket.location = None
    ticket.error, ticket.moved_bytes = inner.error, inner.moved_bytes
    ticket.started_s, ticket.ended_s, ticket.cpu_s = inner.started_s, inner.ended_s, inner.cpu_s
    inner.buffer = None  # before `finish`: waiters may expect the memory to be released
    ticket.finish()
