"""StripedStore: several stores, usually one per disk, used as one.

Guarantees beyond those of `Store`:

1. Each write goes whole to the store that will probably end it first (`_stores.lanes`); its read goes there too.
2. A write that fails is tried on the other stores, once each, while its bytes are still in memory: its ticket ends
   only when one of them has it or none of them could. The error is then the first one.
3. A store that failed is left alone for a while, then tried again. There is a RuntimeWarning at the first failure,
   and at the next after it has worked again.
4. What a failed attempt took of a store is given back there.

A write is one ticket to its user (the outer one) and, beneath it, one ticket of a store at a time (the inner one).

Where threads meet:

- `discard` against the end of a write. The submitter's thread (1) sets `discarded`, (2) takes `placed`. The worker that
  ends the write (a) sets `placed`, (b) looks at `discarded`, and if it is set (c) takes `placed`. If (1) comes before
  (b) the worker gives the space back, else (a) was before (2) and the submitter does. Where both try, `dict.pop` gives
  `placed` to one of them.
- `cancel` against the start of a write. The inner ticket decides: if it can be cancelled no worker has begun it, and
  the outer one can be. An attempt after the first may be queued too, but by then the outer ticket is RUNNING, as its
  callbacks have run; so that is asked first.
- A failed attempt against its successor. The worker of the store that failed submits to the next and returns; that
  store's worker may have ended the outer ticket by then. What the first still sets (`inner`, `watch`) is not read then.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

from .._buffer import Buffer
from .._errors import StoreBroken, StoreClosed, StoreError
from .._store import Store
from .._ticket import QUEUED, Before, OnDone, Ticket
from .._workers.fork import ForkAware
from .lanes import Ended, Lane, choose


class StripedLocation(NamedTuple):
    """Where a write went: in which of the stores, and where in that one. `skew` is its address modulo `alignment`."""

    store_index: int
    location: Any
    nbytes: int
    skew: int


class _Write(Ticket):
    """The outer ticket of a write. `inner` is that of the attempt under way."""

    inner: Ticket | None = None
    index = -1  # of the store that has the inner ticket
    lane: Lane
    discarded = False
    first_error: StoreError | None = None  # of an attempt that failed
    own_fault = False  # the submitter's own `before` failed, no store did
    placed: tuple[int, Ticket] | None = None  # the store, and the inner ticket to discard there; taken with `dict.pop`

    def cancel(self) -> bool:
        inner, index = self.inner, self.index
        if inner is None or self.state is not QUEUED or not inner.cancel():
            return False
        self.placed = index, inner
        self.lane.ended.append(Ended(time.perf_counter(), self.nbytes, moved=False, failed=False))
        return super().cancel()

    def check(self, since_s: float) -> None:
        if self.inner is not None:
            self.inner.check(since_s)


class StripedStore(Store, ForkAware):
    """Several stores as one `Store`.

    Args:
        stores: at least one. They belong to this store from now on: it closes them.
    """

    alignment = 4096  # the largest of a file store's; which of them can be opened at all, their first writes show

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise ValueError("a striped store needs at least one store, got none")
        self.stores = tuple(stores)
        self._lanes = [Lane() for _ in stores]
        self._lock = threading.Lock()  # of the lanes
        self._failing: dict[int, object] = {}  # stores that were warned of and have not worked since
        self._closed = False
        self.heed_forks()

    def submit_write(self, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        ticket = _Write(buffer, None, _nothing, on_done)
        if not self._send(ticket, (), None if before is None else partial(_begin, ticket, before)):
            raise ticket.first_error or StoreClosed("the store is closed; make a new one")
        return ticket

    def submit_read(self, location: StripedLocation, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        store = self.stores[location.store_index]
        if buffer.padded and store.alignment > self.alignment:  # the padding promised may be too small
            buffer = buffer._replace(padded=False)
        return store.read(location.location, buffer, on_done=on_done, before=before)

    def discard(self, ticket: Ticket) -> None:
        ticket.cancel()
        if isinstance(ticket, _Write):
            ticket.discarded = True
            self._give_back(ticket)

    def trim(self) -> None:
        for store in self.stores:
            store.trim()

    def allocated_bytes(self) -> int:
        return sum(store.allocated_bytes() for store in self.stores)

    @property
    def capacity_bytes(self) -> int | None:
        known = [store.capacity_bytes for store in self.stores]
        return sum(each or 0 for each in known) if None not in known else None

    @property
    def used_bytes(self) -> int:
        return sum(store.used_bytes for store in self.stores)

    def resident(self, location: StripedLocation | None) -> Buffer | None:
        return None if location is None else self.stores[location.store_index].resident(location.location)

    def close(self) -> None:
        self._closed = True
        with ExitStack() as stack:
            for store in self.stores:
                stack.callback(store.close)
                store.abandon()  # all end at the same time

    def abandon(self) -> None:
        self._closed = True
        for store in self.stores:
            store.abandon()

    def forget(self) -> None:
        """In a forked child: another thread may have held the lock."""
        self._lock = threading.Lock()

    # -- attempts ------------------------------------------------------------------------------------------------

    def _send(self, ticket: _Write, tried: tuple[int, ...], before: Callable[[], None] | None) -> bool:
        """Submit the write to the best store not yet tried, until one takes it; False if none does."""
        buffer, nbytes = ticket.buffer, ticket.nbytes
        assert buffer is not None
        while True:
            index = None if self._closed else self._begin_in_lane(nbytes, tried)
            if index is None:
                return False
            tried = (*tried, index)
            try:
                inner = self.stores[index].write(
                    buffer, on_done=partial(self._ended, ticket, index, tried), before=before
                )
            except (StoreError, RuntimeError, MemoryError, OSError) as cause:  # without a thread or memory for it too
                error = cause if isinstance(cause, StoreError) else StoreBroken(f"a write cannot begin: {cause}")
                self._degraded(index, error, nbytes)
                ticket.first_error = ticket.first_error or _bare(error)
                continue
            ticket.watch, ticket.lane, ticket.index, ticket.inner = inner.watch, self._lanes[index], index, inner
            return True

    def _begin_in_lane(self, nbytes: int, tried: tuple[int, ...]) -> int | None:
        """Choose a store for a write that begins now."""
        now_s = time.perf_counter()
        with self._lock:
            index = choose(self._lanes, nbytes, now_s, tried)
            if index is not None:
                self._lanes[index].begin(nbytes, now_s)
        return index

    def _ended(self, ticket: _Write, index: int, tried: tuple[int, ...], inner: Ticket) -> None:
        """On a store's worker: an attempt is over."""
        if ticket.state is QUEUED:  # nothing was to be waited for, or it ended before it began
            ticket.start()
        if inner.error is None:
            buffer = ticket.buffer
            assert buffer is not None
            self._lanes[index].ended.append(Ended(inner.ended_s, ticket.nbytes, moved=True, failed=False))
            self._failing.pop(index, None)
            ticket.location = StripedLocation(index, inner.location, ticket.nbytes, buffer.address % self.alignment)
            ticket.moved_bytes, ticket.started_s, ticket.ended_s = inner.moved_bytes, inner.started_s, inner.ended_s
            ticket.placed = index, inner
            if ticket.discarded:
                self._give_back(ticket)
        else:
            self.stores[index].discard(inner)
            if self._try_again(ticket, index, tried, inner.error):
                return
            ticket.error = ticket.first_error
            ticket.started_s, ticket.ended_s = inner.started_s, inner.ended_s
        inner.buffer = None  # now, as a waiter of the outer ticket may look whether its memory has been released
        ticket.finish()

    def _try_again(self, ticket: _Write, index: int, tried: tuple[int, ...], error: BaseException) -> bool:
        """Submit a failed write to another store; False if there is none, or no use in it."""
        assert isinstance(error, StoreError)
        ticket.first_error = ticket.first_error or error
        if ticket.own_fault:
            self._lanes[index].ended.append(Ended(time.perf_counter(), ticket.nbytes, moved=False, failed=False))
            return False
        self._degraded(index, error, ticket.nbytes)
        return not ticket.discarded and self._send(ticket, tried, None)

    def _degraded(self, index: int, error: StoreError, nbytes: int) -> None:
        """Let a store that has failed rest, and warn of it once."""
        closed = isinstance(error, StoreClosed)
        self._lanes[index].ended.append(Ended(time.perf_counter(), nbytes, moved=False, failed=not closed))
        mine = object()
        if not closed and self._failing.setdefault(index, mine) is mine:
            with suppress(Exception):  # a warning made an error must not end a transfer
                self._warn(index, error)

    def _warn(self, index: int, error: StoreError) -> None:
        warnings.warn(
            f"storage path {index + 1} of {len(self.stores)} failed ({error}); going on with the others",
            RuntimeWarning,
            stacklevel=2,
        )

    def _give_back(self, ticket: _Write) -> None:
        placed = vars(ticket).pop("placed", None)
        if placed is not None:
            index, inner = placed
            ticket.location = None  # in a host store it is the memory itself
            self.stores[index].discard(inner)


def _begin(ticket: _Write, before: Callable[[], None]) -> None:
    """Call the submitter's `before`, on a store's worker ahead of the first attempt."""
    ticket.start()
    try:
        before()
    except BaseException:
        ticket.own_fault = True
        raise


def _bare(error: StoreError) -> StoreError:
    """Drop the tracebacks of an error and its causes: their frames lead back to the submitter's and keep its locals."""
    chained: BaseException | None = error
    while chained is not None:
        chained.__traceback__ = None
        chained = chained.__cause__ or chained.__context__
    return error


def _nothing(_: Ticket) -> None:
    """Do no work: the inner ticket does it."""
