"""Mover: takes one record's bytes out to the store and brings them back.

A CPU's record is written from where it is. A device's is first copied to host memory (`Copies`). When that copy is
over the device's memory goes, and the write begins, from host memory.

Guarantees:

1. A record's memory goes the moment its write has ended, or its copy is over, and nobody else holds the storage. The
   worker that ended the write sees to that (`land`) unless another thread holds the lock; then that thread does, when
   it lets go (`catch_up`). A worker thus never waits for a hook, nor a hook for a worker.
2. A failed write leaves the tensor in memory (`Landing` says what else becomes of a write). A failed read raises
   TransferError naming the tensor.
3. After `stop` nothing is queued any more. What the store then calls off is no failure.

Every method wants the engine's lock held, except `_write_ended`, `catch_up` and `await_read`, which take it.

Where a hook and a worker meet, three interleavings are guarded against:

    1. hook: store.write(...)  ->  worker: moves the bytes, appends to `ended`, before the hook has noted the ticket.
       The hook has the lock and `_sending` is set, so the worker leaves; the hook lands it in `catch_up`.
    2. worker: appends to `ended`, cannot have the lock  ->  hook: lets go of the lock, without having looked since.
       The hook looks at `ended` after letting go (`catch_up`), so one of the two sees the write.
    3. hook: waits for room, which lets go of the lock  ->  worker: must land, or nobody would wake the hook.
       `staging.patience_s` has the worker wait for the lock a moment then, and only then: another thread that holds it
       may be waiting for this very worker.
"""

from __future__ import annotations

import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from io_backends import BufferPool, Store, StoreError, Ticket, TicketState, interrupts

from .._device import streams
from .._group.node_share import NodeShare
from .._memory.host_pools import HostMemory
from .._memory.limits import Limits
from .._memory.pressure import Pressure
from .._plan import clock, policy
from .._record.record import PENDING, READING, RESIDENT, WRITING, Record
from .._stats import Counters, Recorder
from .buffers import Buffers
from .copies import LINGERS, PERIOD_S, Copies, Copy, Unbegun
from .cost import Cost
from .daily_allowance import Allowance
from .failures import Failures
from .landing import CLOSED, MOVED, Landing
from .staging import Staging
from .writes import Writes

QUEUED = TicketState.QUEUED  # by a name of its own, as the states of a record
# Of copies of so many bytes a device times every eighth: two events of each cost 6 us.
_TIMED_BYTES, _TIMED_EVERY = 1 << 20, 8


class Mover:
    """Moves records between memory and one store, made by `open_store(on_device)` when first needed."""

    def __init__(
        self,
        lock: threading.RLock,
        counters: Counters,
        open_store: Callable[[bool], Store],
        limits: Limits,
        memory: HostMemory,
        allowance: Allowance,
        host_cap_bytes: int | None,
        node: NodeShare,
    ) -> None:
        self.lock = lock
        self._has_lock = ownership(lock)
        self.counters = counters
        self.limits = limits
        self.pressure = Pressure(limits.reserve_bytes)
        self.staging = Staging(threading.Condition(lock), limits.timeout_s, self.land, host_cap_bytes)
        self.recorder = Recorder()
        self.failures = Failures(counters, limits.timeout_s)
        self.landing = Landing(counters, self.failures)
        self.closed = False
        self.torn = False  # what is counted here is not to be relied on: nothing lands any more
        self.store: Store | None = None
        # What a store has in its queues keeps no mover, nor a mover its store, once nobody else has it.
        self._on_written = partial(_written, weakref.ref(self))
        self._made: list[Store] = []  # that one; ahead of its threads it has who ends them
        self._store_goes = weakref.finalize(self, _abandon, self._made)
        self._store_goes.atexit = False
        self._open_store = open_store
        self.memory = memory
        self._buffers = Buffers(memory, limits.timeout_s)
        self.allowance = allowance
        self._node = node
        self._share = 1.0
        self._need_bytes: int | None = None  # of the last step; None before one has ended
        self.ended: deque[Ticket] = deque()  # writes that have ended and are still to be landed
        self.copies = Copies()
        self._writes = Writes(self.staging, allowance)
        self.timed: deque[tuple[streams.Arrival, int]] = deque()  # copies to a device, and their bytes
        self._large_copies = 0
        self._sending = False
        self.sent_bytes = 0  # by writes queued in this step
        self.cost = Cost()  # of this step's transfers
        self._reads_ended = 0

    # -- out -----------------------------------------------------------------------------------------------------

    def send(self, record: Record) -> str | None:
        """Queue the write of a record in memory, after waiting for room; returns why, if it stays after all."""
        if self.closed:
            return CLOSED
        nbytes = record.nbytes
        self.pressure.moved(nbytes)
        if not self.wait_for_room(nbytes, self.limits.staging_bytes, staged=record.stream is not None):
            if not interrupts.waiting():
                self.failures.no_room()
            return policy.NOT_WRITTEN
        if self.closed:  # by another thread, meanwhile
            return CLOSED
        if (alias := record.alias) is None or record.wanted or record.state not in (PENDING, RESIDENT):
            return policy.FITS  # changed hands while we waited, or backward has asked for it
        if record.was_moved():
            return MOVED
        if not self.allowance.take(nbytes):
            return policy.DECLINED
        tracer = interrupts.tracer()
        self._sending = True  # a write may have ended before its ticket is known here
        try:
            ticket, copy = self._queue(record, alias)
        except (StoreError, OSError, RuntimeError, MemoryError) as error:  # torch reports a lack of memory either way
            interrupts.pass_on(error, tracer)
            self.allowance.give_back(nbytes)
            self.failures.not_queued(error)
            return policy.NOT_WRITTEN
        finally:
            self._sending = False
        record.send(ticket)
        if copy is None:
            self._writes.begin(ticket, record)
        else:
            self.copies.add(copy, record.device)
        self.sent_bytes += nbytes
        self.staging.depart(nbytes)
        self.counters.staging_peak_bytes = self.staging.peak_bytes
        if copy is not None and not self.copies.watched:
            args = weakref.ref(self), record.device
            with suppress(RuntimeError):  # "can't start new thread": the hooks ask, then
                threading.Thread(target=_watch, args=args, name="tba-copies", daemon=True).start()
                self.copies.watch(True)
        return None

    def _queue(self, record: Record, alias: Tensor) -> tuple[Ticket, Copy | None]:
        """Have the store write a record, or first a device copy it out: that copy is returned too."""
        if self.store is None:
            self._made.append(self._open_store(record.stream is not None))
            self.store = self._made[-1]
            self.store.resize(self._share)
        timed = record.stream is not None and self._times(record.nbytes)
        buffer, departure, frees = self._buffers.out(record, alias, self.store, timed=timed)
        if departure is None:
            return self.store.write(buffer, on_done=self._on_written), None
        unbegun = Unbegun(buffer)
        return unbegun, Copy(unbegun, record.ref, buffer, departure, frees)

    def wait_for_room(self, nbytes: int, cap_bytes: int, *, staged: bool = False) -> bool:
        """Wait until so many bytes more fit; False when transfers have stalled, or for an interrupt (`Staging`)."""
        if self.staging.has_room(nbytes, cap_bytes, staged=staged):
            return True
        begun_s, begun = time.perf_counter(), self.cost.begin_wait()
        room = self.staging.wait_for_room(nbytes, cap_bytes, staged=staged)
        ended_s = time.perf_counter()
        self.cost.wait(ended_s - begun_s, begun)
        self.counters.backpressure_s += ended_s - begun_s
        self.recorder.note("room", begun_s, ended_s, nbytes, "")
        return room

    def _write_ended(self, ticket: Ticket) -> None:
        """Land a write that has ended, on the worker, unless another thread will."""
        self.ended.append(ticket)
        # Who waits for room lets go of the lock. Everybody else who holds it looks at `ended` afterwards, but may be
        # waiting for a read that is this worker's next.
        if self._sending or not self.lock.acquire(timeout=self.staging.patience_s):
            return
        try:
            self.land()
        finally:
            self.lock.release()

    def catch_up(self) -> None:
        """Land what has ended while others held the lock. Call it after letting go of the lock."""
        while self.ended and not self.torn and not self._has_lock():
            try:
                if not self.lock.acquire(blocking=False):
                    return
                self.land()
            finally:
                if self._has_lock():
                    self.lock.release()

    def land(self) -> bool:
        """Give back the memory of what has been copied out or written; whether a device is still waited for."""
        if self.torn:
            return False
        if self.copies.count:
            for copy in self.copies.over():
                self._write_copied(copy)
        while self.timed and (seconds := self.timed[0][0].seconds()):
            self.cost.back.sample(self.timed.popleft()[1], seconds)
        spills = None if self.store is None else self.store.spills
        while spills:
            spilled = spills.popleft()
            self.cost.spilled(spilled.moved_bytes, clock.current.carried(spilled))
        while self.ended and not self.torn:
            ticket = self.ended.popleft()
            write = self._writes.end(ticket)
            self.counters.written_bytes += ticket.moved_bytes
            way = None if write.at_once or spills is not None else self.cost.out
            self.cost.add(ticket.moved_bytes, clock.current.carried(ticket), way)
            record = write.record()
            if self.recorder.trace is not None:
                label = record.name() if record is not None else "dropped"
                self.recorder.note("write", ticket.started_s, ticket.ended_s, ticket.nbytes, label)
            if record is not None and record.write is ticket:
                assert self.store is not None
                if record.state is WRITING:
                    self.landing.settle(record, ticket, self.store)
                elif record.staged is not None:
                    self.landing.settle_staged(record, ticket, self.store)
        return self.copies.count > 0

    def _write_copied(self, copy: Copy) -> None:
        """Begin the write of what a device has copied out; its memory goes, unless the store moves that itself."""
        record, ticket = copy.record(), copy.ticket
        if ticket.done():
            return  # taken back
        if record is None or record.wanted or record.write is not ticket:
            if record is not None and record.write is ticket:
                self.take_back(record)
            else:
                self._writes.cancel(ticket)
            return
        assert self.store is not None
        tracer = interrupts.tracer()
        self._sending = True
        try:
            written = self.store.write(copy.buffer, on_done=self._on_written)
        except (StoreError, OSError, RuntimeError, MemoryError) as error:
            interrupts.pass_on(error, tracer)
            self._writes.cancel(ticket)
            self.landing.not_begun(record, error, self.store)
            return
        finally:
            self._sending = False
        record.pass_on(written)
        write = self._writes.begin(written, record, at_once=written.done())
        if self.store.spills is not None or write.at_once:
            self.cost.out.sample(record.nbytes, copy.departure.seconds())
        if copy.frees and not write.at_once:
            host = copy.buffer.owner
            assert isinstance(host, Tensor)
            if self.landing.stage(record, host):
                self._writes.stage(written)

    def take_back(self, record: Record) -> bool:
        """Cancel a queued write: the bytes stay in memory. False if it is running or done; it is `wanted` then."""
        ticket = record.write
        if ticket is not None and self._writes.cancel(ticket):
            assert self.store is not None
            self.landing.take_back(record, self.store)
            return True
        record.want()
        return False

    def await_write(self, record: Record) -> bool:
        """Wait until a record's memory is written from no more; False if transfers stall, or for an interrupt."""
        if record.state is not WRITING:
            return True
        begun_s, begun = time.perf_counter(), self.cost.begin_wait()
        ended = self.staging.wait_until(lambda: record.state is not WRITING)
        waited_s = time.perf_counter() - begun_s
        self.cost.wait(waited_s, begun)
        self.counters.backpressure_s += waited_s
        return ended

    def await_writes(self, where: str) -> None:
        """Wait until no write is under way. Raises StalledError, which names `where`, once none has ended for long."""
        while not self.staging.wait_until_idle():
            interrupts.throw()
            raise self.failures.not_flushed(where)

    def discard(self, ticket: Ticket) -> None:
        """Free the place in the store of a dead record."""
        if self.store is not None:
            if ticket.state is QUEUED:
                self._writes.cancel(ticket)
            if not isinstance(ticket, Unbegun):
                self.store.discard(ticket)

    def forward(self, record: Record) -> None:
        """Count a record that backward asks for while it is still in memory: nothing is read."""
        self.counters.forwarded_bytes += record.logical_bytes
        if self.recorder.trace is not None:
            now_s = time.perf_counter()
            self.recorder.note("forwarded", now_s, now_s, record.nbytes, record.name())

    # -- back ----------------------------------------------------------------------------------------------------

    def fetch(self, record: Record, *, asked: bool) -> None:
        """Queue the read of a stored record; `asked`: backward waits for it. Raises ClosedError, TransferError."""
        if record.staged is not None:
            self._restore_staged(record, record.staged)
            return
        if self.closed or self.store is None:
            raise self.failures.closed(record)
        assert record.write is not None
        location = record.write.location
        there = self.store.resident(location)
        if record.stream is not None and there is not None:
            self.counters.read_bytes += record.nbytes
            self._restore_here(record, streams.host_bytes(there.owner))
            return
        tracer = interrupts.tracer()
        try:
            view, buffer, ready, before = self._buffers.back(record, self.store, there, asked=asked)
            ticket = self.store.read(location, buffer, on_done=self._read_ended, before=before)
        except (StoreError, OSError, RuntimeError, MemoryError) as error:
            interrupts.pass_on(error, tracer)
            raise self.failures.unreadable(record, error) from error
        record.read_into(ticket, view, ready)

    def _restore_here(self, record: Record, host: Tensor) -> None:
        """Start the copy of a record to its device from where it is in host memory."""
        arrival = self._buffers.restore(record, host, timed=self._times(record.nbytes))
        if arrival is not None and arrival.timed:
            self.timed.append((arrival, record.nbytes))

    def _times(self, nbytes: int) -> bool:
        """Whether a device is to time a copy of so many bytes: every eighth of those that are large enough to tell."""
        if nbytes < _TIMED_BYTES:
            return False
        self._large_copies += 1
        return self._large_copies % _TIMED_EVERY == 1

    def _restore_staged(self, record: Record, staged: Tensor) -> None:
        """Bring a record back from where it is in host memory; the write that has not begun is not wanted any more."""
        self.counters.read_bytes += record.nbytes
        self._restore_here(record, staged)
        if record.write is not None and self._writes.cancel(record.write):
            ticket = record.unwritten()
            assert ticket is not None
            assert self.store is not None
            self.store.discard(ticket)

    def read_apart(self, record: Record) -> Tensor:
        """Read a stored record again, flat into memory of its own, with nothing counted or changed. It waits.

        Without the lock, or with it: nothing here is shared but the store. Raises ClosedError, TransferError.
        """
        store, ticket = self.store, record.write
        if (staged := record.staged) is not None:
            return staged
        location = None if ticket is None else ticket.location
        if self.closed or store is None or location is None:
            raise self.failures.closed(record)
        if (there := store.resident(location)) is not None:
            return streams.host_bytes(there.owner)
        try:
            view, buffer = BufferPool(max(store.alignment, mmap.PAGESIZE)).lease(record.nbytes, location.skew)
            store.read(location, buffer).wait(self.limits.timeout_s)
        except (StoreError, OSError, MemoryError) as error:
            raise self.failures.unreadable(record, error) from error
        return streams.host_bytes(view)

    def await_read(self, record: Record) -> None:
        """Wait for a record's read, however late, without the lock. Raises StalledError."""
        ticket = record.read
        if ticket is None:
            return
        begun_s, begun = time.perf_counter(), self.cost.begin_wait()
        try:
            ended = -1
            while not ticket.wait(self.limits.timeout_s):
                if self._reads_ended != ended:  # others were ahead in the queue, and the device moves
                    ended = self._reads_ended
                    continue
                raise self.failures.late(record)
        except StoreError as error:
            if not ticket.done():  # nothing moves any more, or nobody has it
                raise self.failures.late(record, error) from error
            return  # `arrive` tells, with the lock
        finally:
            ended_s = time.perf_counter()
            with self.lock:
                self.counters.wait_s += ended_s - begun_s
                self.cost.wait(ended_s - begun_s, begun)
                if self.recorder.trace is not None:
                    self.recorder.note("wait", begun_s, ended_s, record.nbytes, record.name())

    def _read_ended(self, ticket: Ticket) -> None:
        self._reads_ended += 1  # only ever compared for change, so a lost update does no harm

    def arrive(self, record: Record) -> bool:
        """Turn a read that has ended into a restored tensor; False while it is under way. Raises TransferError."""
        ticket, kept = record.read, record.view
        if record.state is not READING or ticket is None:
            return True
        if not ticket.done():
            return False
        if ticket.error is not None:
            record.read_failed()
            raise self.failures.not_read(record, ticket.error) from ticket.error
        self.counters.read_bytes += ticket.moved_bytes
        lower = record.stream is not None and self.store is not None and self.store.spills is not None
        way = self.cost.disk_back if lower else self.cost.back
        self.cost.add(ticket.moved_bytes, clock.current.carried(ticket), way)
        if self.recorder.trace is not None:
            self.recorder.note("read", ticket.started_s, ticket.ended_s, record.nbytes, record.name())
        assert kept is not None
        self._buffers.restore(record, kept)
        return True

    # -- both ----------------------------------------------------------------------------------------------------

    def end_step(self, need_bytes: int) -> None:
        """Give back memory and disk blocks that the last step did not use.

        `need_bytes`: that the step has wanted to move, at one time.
        """
        self._need_bytes = need_bytes
        self.sent_bytes = 0
        self.failures.end_step()
        self.cost.end_step()
        self.recorder.end_step()
        self.memory.trim()
        if self.store is not None and not self.closed:
            self.store.trim()

    def take_share(self) -> None:
        """Take this rank's share of what the node has, by what steps before have needed. Called where one ends."""
        share = self._share if self._need_bytes is None else self._node.take(self._need_bytes)
        if share != self._share:
            self._share = share
            for part in (self.memory, self.staging, self.allowance):
                part.resize(share)
            if self.store is not None:
                self.store.resize(share)

    def tear(self) -> None:
        """Land nothing any more: an exception that nobody expected has come in the midst of a change."""
        self.torn = True

    def hand_on(self) -> None:
        """Leave the store to another engine: it does not end with this one."""
        self._store_goes.detach()

    def stop(self) -> None:
        """Move nothing any more: the store is about to be closed, by its owner."""
        self.closed = True
        self.landing.closing = True
        for copy in () if self.torn else self.copies.give_up():
            record = copy.record()
            self._writes.cancel(copy.ticket)
            if record is not None and record.write is copy.ticket:
                assert self.store is not None
                self.landing.call_off(record, self.store)

    def close(self) -> None:
        """Give memory back. Call `stop` before, and close the store."""
        streams.finish()
        self.memory.close()
        self.allowance.close()

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes that the store may hold at once; None for no limit, or no store yet."""
        return None if self.store is None else self.store.capacity_bytes

    def file_bytes(self) -> int:
        """Bytes of the blocks that the store occupies."""
        return self.store.allocated_bytes() if self.store is not None and not self.closed else 0


def ownership(lock: threading.RLock) -> Callable[[], bool]:
    """Return what tells whether this thread has a lock, in one call of C."""
    owned: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]  # which `threading.Condition` asks too
    return owned


def _watch(weak: weakref.ref[Mover], device: torch.device) -> None:
    """Land what a device has copied out, until there has been nothing for some time, or the mover is gone."""
    idle = 0
    with suppress(RuntimeError):
        streams.be_on(device)
    while True:
        time.sleep(PERIOD_S)
        mover = weak()
        if mover is None:
            return
        if not mover.lock.acquire(blocking=False):
            continue
        try:
            idle = 0 if mover.land() else idle + 1
            if idle > LINGERS or mover.torn or mover.closed:
                mover.copies.watch(False)
                return
        except BaseException:
            mover.copies.watch(False)  # the hooks meet the same error
            return
        finally:
            mover.lock.release()
            with suppress(Exception):  # the hooks meet the same error
                mover.catch_up()  # what a worker could not land meanwhile
            del mover


def _written(weak: weakref.ref[Mover], ticket: Ticket) -> None:
    mover = weak()
    if mover is not None:
        mover._write_ended(ticket)


def _abandon(stores: list[Store]) -> None:
    for store in stores:
        store.abandon()
