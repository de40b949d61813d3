"""TwoLevelStore: host memory first; what does not fit goes to a file store, coldest first.

A training step writes in the order of forward and reads in reverse, so the oldest write in host memory is needed last.
It is the coldest and makes way.

Guarantees beyond those of `Store`:

1. Host memory holds at most `budget_bytes`, plus what reads in flight hold. A write waits, on a worker of this store,
   until what makes way for it is in the file: a slow file store slows writes down, but memory does not grow.
2. Bytes leave host memory only after their write to the file has succeeded. If that fails they stay, and the write that
   needed the room fails with `StoreFull`; the next write tries again, as the file may have room by then.
3. A read takes the bytes from where they are when it is submitted. During a spill that is host memory, which the reader
   keeps alive whatever becomes of the spill.
4. `discard` works in every state: it cancels a queued write or spill, and lets a running one end first.
5. Only `given` memory stays in host memory. What the caller may edit or reuse goes to the file.

Assumptions: the two stores have no other user and are closed with this one. The file store never waits for this one: a
fork holds the file store's transfers but not this store's workers, which only wait for those.

Where threads meet:

- One lock (`_changed`) guards all state of writes. Nobody waits for a transfer while holding it.
- `discard` may run in a finalizer of the thread that holds the lock. It appends to `_discarded` and applies that if the
  lock is free. If not, the holder does so after releasing the lock: the append comes before that, or the lock was free
  when `discard` tried.
- `discard` and a spill. The worker (1) marks the write SPILLING, (2) submits it to the file, (3) stores the file's
  ticket and checks `discarded`, (4) waits, (5) checks `discarded` again. Before (3) a discard only sets the flag, and
  (3) cancels. After (3) it cancels the file's ticket itself. If that is too late, (5) frees both places.
- `discard` and a write being stored. The place is COMING until the bytes are somewhere: the worker that put them there
  finds `discarded` set, under the lock, and removes them.
- Two workers that need room. Each spills another write, because the first marks its own under the lock. A worker that
  finds none to spill waits for those in progress; each end of a spill, and each discard, notifies it.
- `resident` takes no lock: it reads one reference, and the returned buffer keeps its memory alive.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from .._buffer import Buffer
from .._errors import StoreClosed, StoreError, StoreFull, TransferCancelled
from .._store import Store
from .._ticket import Before, OnDone, Ticket
from .._workers.workers import Workers
from .host import HostStore

# How often a waiting thread polls: `abandon` may run in a finalizer, so it cannot take the lock to notify.
_PERIOD_S = 1.0
_MOST_SPILLS = 1024  # that nobody has taken out


class Place(enum.Enum):
    """Where the bytes of a write are.

    ::

        COMING -> HOST -> SPILLING -> FILE      SPILLING -> HOST if the file store failed,
           `-----------------------> FILE       at once if the write alone exceeds the budget or its memory is not
                                                `given`; GONE from any
    """

    COMING = enum.auto()  # submitted and not stored yet: in the submitter's memory
    HOST = enum.auto()  # in host memory
    SPILLING = enum.auto()  # in host memory, being written to the file
    FILE = enum.auto()  # only in the file
    GONE = enum.auto()  # discarded, or not stored because of a failure


class Stored:
    """The location of a write. `skew` is as in `Location` for bytes in the file; bytes in memory are copied anyway."""

    __slots__ = ("discarded", "file", "host", "nbytes", "place", "reserved", "skew")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.skew = 0
        self.place = Place.COMING
        self.discarded = False
        self.reserved = False  # has room in host memory that it does not use yet
        self.host: Buffer | None = None  # in HOST and SPILLING
        self.file: Ticket | None = None  # of the file store, in SPILLING and FILE


def coldest(stored: Iterable[Stored]) -> Stored | None:
    """The write to spill next, given all in the order of submission; None if there is none."""
    return next((one for one in stored if one.place is Place.HOST), None)


class TwoLevelStore(Store):
    """A `Store` over two others.

    Args:
        host: its threads copy what is read from host memory; nothing is written to it.
        file: any store, the lower level.
        budget_bytes: most host memory that this store keeps.
        threads: workers; each spills, or waits for a device.
        timeout_s: a wait fails if nothing has moved for this long; None for never.
    """

    def __init__(
        self, host: HostStore, file: Store, budget_bytes: int, *, threads: int = 2, timeout_s: float | None = 60.0
    ) -> None:
        if budget_bytes < 0:
            raise ValueError(f"a budget cannot be negative, got {budget_bytes} bytes")
        self.budget_bytes = self._first_bytes = budget_bytes
        self._host = host
        self._file = file
        self._changed = threading.Condition(threading.Lock())
        self._upper: dict[Stored, None] = {}  # COMING, HOST and SPILLING, in the order of submission
        self._host_bytes = 0
        self._discarded: deque[Ticket] = deque()
        self._spills: deque[Ticket] = deque(maxlen=_MOST_SPILLS)
        self._closed = False
        self._workers = _Unheld(threads, "tba-two-level", lambda: None, on_forked=self._forget, timeout_s=timeout_s)

    @property
    def alignment(self) -> int:
        return self._file.alignment

    @property
    def spills(self) -> deque[Ticket]:
        """Writes to the file that have ended, the last of them, for a reader to take out."""
        return self._spills

    @property
    def host_bytes(self) -> int:
        """Bytes in or reserved in host memory."""
        with self._locked():
            return self._host_bytes

    def submit_write(self, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        stored = Stored(buffer.nbytes)
        ticket = Ticket(buffer, stored, partial(self._store, stored), on_done, before)
        with self._locked():
            self._upper[stored] = None
            if buffer.given and before is None and self._host_bytes + buffer.nbytes <= self.budget_bytes:
                self._host_bytes += buffer.nbytes
                stored.reserved = True
        try:
            if stored.reserved:  # nothing is moved
                self._workers.refuse()
                ticket.run_here()
                return ticket
            return self._workers.submit(ticket, urgent=False)
        except StoreError:
            with self._locked():
                self._unreserve(stored)
            self.discard(ticket)
            raise

    def submit_read(self, location: Stored, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        with self._locked():
            if self._closed:
                raise StoreClosed("the store is closed; make a new one")
            if location.place in (Place.COMING, Place.GONE):
                raise ValueError("nothing to read there: the write failed, has not ended, or was discarded")
            if location.place is Place.FILE:
                assert location.file is not None
                return self._file.read(location.file.location, buffer, on_done=on_done, before=before)
            assert location.host is not None
            return self._host.read(location.host, buffer, on_done=on_done, before=before)

    @property
    def capacity_bytes(self) -> int | None:
        below = self._file.capacity_bytes
        return None if below is None else self.budget_bytes + below

    def resize(self, share: float) -> None:
        with self._locked():
            self.budget_bytes = int(share * self._first_bytes)
            self._changed.notify_all()  # one who waits for room may have it now
        self._file.resize(share)

    @property
    def used_bytes(self) -> int:
        return self.host_bytes + self._file.used_bytes

    def resident(self, location: Stored | None) -> Buffer | None:
        return None if location is None else location.host

    def discard(self, ticket: Ticket) -> None:
        ticket.cancel()
        self._discarded.append(ticket)
        self._catch_up()

    def allocated_bytes(self) -> int:
        return self.host_bytes + self._file.allocated_bytes()

    def trim(self) -> None:
        self._file.trim()

    def close(self) -> None:
        with self._locked():
            self._closed = True
            self._changed.notify_all()
        self._workers.stop()
        try:
            self._file.close()
        finally:
            self._workers.join()
            with self._locked():
                for stored in [one for one in self._upper if one.place is Place.HOST]:
                    self._leave_host(stored, Place.GONE)
            self._host.close()

    def abandon(self) -> None:
        self._closed = True
        self._workers.stop()
        self._file.abandon()
        self._host.abandon()

    # -- on the workers ------------------------------------------------------------------------------------------

    def _store(self, stored: Stored, ticket: Ticket) -> None:
        buffer = ticket.buffer
        assert buffer is not None
        try:
            if not (buffer.given and (stored.reserved or self._make_room(stored))):
                self._store_in_file(stored, buffer)
            else:
                with self._locked():
                    stored.host, stored.place, stored.reserved = buffer, Place.HOST, False
                    self._changed.notify_all()
                    if stored.discarded:
                        self._leave_host(stored, Place.GONE)
        except BaseException:
            with self._locked():
                self._unreserve(stored)
                self._upper.pop(stored, None)
                stored.place = Place.GONE
            raise
        ticket.moved_bytes = stored.nbytes

    def _store_in_file(self, stored: Stored, buffer: Buffer) -> None:
        """Write to the file; if discarded meanwhile, free that at once. After an error nothing is left in the file."""
        try:
            ticket = self._file.write(buffer)
            with self._locked():
                stored.file = ticket
                if stored.discarded:
                    ticket.cancel()
            self._await(ticket)
        except BaseException:
            with self._locked():
                self._leave_file(stored)
            raise
        self._spills.append(ticket)
        with self._locked():
            stored.skew = getattr(ticket.location, "skew", 0)
            if stored.host is not None:
                self._leave_host(stored, Place.FILE)
            else:
                self._upper.pop(stored, None)
                stored.place = Place.FILE
            if stored.discarded:
                self._leave_file(stored)

    def _make_room(self, stored: Stored) -> bool:
        """Reserve host memory, spilling others if needed; False for more than the budget.

        Raises StoreFull, StoreClosed, TransferCancelled.
        """
        while True:
            with self._locked():
                while True:
                    if self._closed:
                        raise StoreClosed("the store was closed before this write was stored")
                    if stored.discarded:
                        raise TransferCancelled(f"a write of {stored.nbytes} bytes was discarded before it was stored")
                    if stored.nbytes > self.budget_bytes:
                        return False
                    if self._host_bytes + stored.nbytes <= self.budget_bytes:
                        self._host_bytes += stored.nbytes
                        return True
                    if coldest(self._upper) is not None:
                        break
                    self._changed.wait(_PERIOD_S)  # others are storing or spilling, which will make room
                    self._settle()
            self._spill_coldest()

    def _spill_coldest(self) -> None:
        """Move the coldest write, if any, to the file. Raises StoreFull if the file fails."""
        with self._locked():
            stored = coldest(self._upper)
            if stored is None:
                return
            buffer, stored.place = stored.host, Place.SPILLING
        assert buffer is not None
        try:
            self._store_in_file(stored, buffer)
        except BaseException as failure:
            with self._locked():
                if stored.discarded:
                    self._leave_host(stored, Place.GONE)
                    return
                stored.place = Place.HOST
                self._changed.notify_all()
                raise StoreFull(
                    f"host memory holds {self._host_bytes} of {self.budget_bytes} bytes and the file store did not "
                    f"take the oldest {stored.nbytes} of them: {failure}; make room there, or raise the budget"
                ) from failure

    def _await(self, ticket: Ticket) -> None:
        """Wait for a transfer of the file store. Raises its error."""
        while not ticket.wait(_PERIOD_S):
            # This wait fails if that store stalls. It has not, so our own waiters must not see a stall either.
            self._workers.moved_s = time.perf_counter()

    # -- with the lock -------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._changed:
                self._settle()
                yield
        finally:
            self._catch_up()

    def _catch_up(self) -> None:
        """Apply pending discards if the lock is free; otherwise its holder does, on release."""
        while self._discarded and self._changed.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._changed.release()

    def _settle(self) -> None:
        while self._discarded:
            ticket = self._discarded.popleft()
            stored, ticket.location = ticket.location, None
            if stored is None:  # discarded before
                continue
            stored.discarded = True
            self._changed.notify_all()  # its write may be waiting for room
            if stored.place is Place.HOST:
                self._leave_host(stored, Place.GONE)
            elif stored.place is Place.FILE:
                self._leave_file(stored)
            elif stored.place is Place.SPILLING:
                if stored.file is not None:
                    stored.file.cancel()  # the spilling worker does the rest, even if this is too late
            else:
                self._upper.pop(stored, None)  # a worker that stores it finds it discarded

    def _unreserve(self, stored: Stored) -> None:
        """Free room that was reserved at submission and never used."""
        if stored.reserved:
            stored.reserved = False
            self._host_bytes -= stored.nbytes
            self._changed.notify_all()

    def _leave_host(self, stored: Stored, place: Place) -> None:
        stored.host, stored.place = None, place
        self._upper.pop(stored, None)
        self._host_bytes -= stored.nbytes
        self._changed.notify_all()

    def _leave_file(self, stored: Stored) -> None:
        ticket, stored.file = stored.file, None
        if ticket is not None:
            self._file.discard(ticket)
        if stored.place is Place.FILE:
            stored.place = Place.GONE

    def _forget(self) -> None:
        """In a forked child: accept nothing more."""
        self._closed = True
        self._changed = threading.Condition(threading.Lock())  # another thread may have held it


class _Unheld(Workers):
    """Workers that a fork does not hold: they wait for transfers of other stores, which it does hold."""

    @contextmanager
    def held(self) -> Iterator[None]:
        yield
