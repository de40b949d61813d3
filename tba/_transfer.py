"""Mover: takes one record's bytes out to the store and brings them back. Every change of a record's state is here.

Guarantees:

1. A record's memory goes the moment its write has ended and nobody else holds the storage. The worker that ended it
   sees to that (`land`) unless another thread holds the lock; then that thread does, when it lets go (`catch_up`).
   A worker thus never waits for a hook, nor a hook for a worker.
2. A copy counts as finished only when it is certain that nobody edited the source meanwhile. The version counter is
   compared when the write ends; but an in-place kernel that is still running has not bumped it yet, and only a later
   look can tell. If the storage is ours alone nobody can be editing it. Otherwise the record is `unconfirmed` until
   a later hook of any thread (no operator of that thread runs then) or `flush`: a counter that has moved poisons it.
3. If the storage's address or size changed under the writer, the copy is worthless and the record becomes an alias
   again, which is what plain PyTorch has.
4. A failed write leaves the tensor in memory. A failed read raises TransferError naming the tensor.

Every method wants the engine's lock held, except `_write_ended`, `catch_up` and `await_read`, which take it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from io_backends import Buffer, Store, StoreError, Ticket, interrupts

from . import _direct, _policy, _streams
from ._endurance import Allowance
from ._errors import ClosedError, StalledError, TransferError
from ._frames import warn
from ._host_memory import HostMemory
from ._policy import Limits
from ._pressure import Pressure
from ._record import HELD, IN_MEMORY, PENDING, POISONED, READING, RESTORED, STORED, WRITING, Record
from ._staging import Staging
from ._stats import Counters, TraceEvent
from ._torch import storage_use_count

_MOVED = "storage resized or replaced before it was written"
# A storage that only our alias (1) and the wrapper we look at it with (1) refer to.
_OURS_ALONE = 2


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
    ) -> None:
        self.lock = lock
        self.counters = counters
        self.limits = limits
        self.pressure = Pressure(limits.reserve_bytes)
        self.staging = Staging(threading.Condition(lock), limits.timeout_s, self.land)
        self.trace: list[TraceEvent] | None = None
        self.closed = False
        self.store: Store | None = None
        self._open_store = open_store
        self.memory = memory
        self.allowance = allowance
        self.unconfirmed: list[weakref.ref[Record]] = []
        self.ended: deque[Ticket] = deque()  # writes that have ended and are still to be landed
        self._in_flight: dict[Ticket, weakref.ref[Record]] = {}
        self._sending = False
        self._learn_size(0)
        self._warned = False
        self._reads_ended = 0

    # -- out -----------------------------------------------------------------------------------------------------

    def send(self, record: Record) -> str | None:
        """Queue the write of a record in memory; waits for room first. If it stays in memory after all: why."""
        if self.closed:
            return "closed"
        nbytes, staging = record.nbytes, self.staging
        self.pressure.moved(nbytes)
        if not staging.has_room(nbytes, self.limits.staging_bytes):
            begun_s = time.perf_counter()
            room = staging.wait_for_room(nbytes, self.limits.staging_bytes)
            self.counters.backpressure_s += time.perf_counter() - begun_s
            if not room:
                if not interrupts.waiting():
                    self._complain(f"no transfer has ended for {self.limits.timeout_s:g} s; tensors stay in memory")
                return _policy.NOT_WRITTEN
        if (alias := record.alias) is None or record.state not in (PENDING, HELD):
            return _policy.FITS  # changed hands while we waited
        if self._moved(record, alias.untyped_storage()):
            return _MOVED
        if not self.allowance.take(nbytes):
            return _policy.DECLINED
        self._sending = True  # a write may have ended before its ticket is known here
        try:
            if self.store is None:
                self.store = self._open_store(record.stream is not None)
                weakref.finalize(self, self.store.abandon).atexit = False
            buffer, arrived = self._prepare(record, alias)
            ticket = self.store.write(buffer, on_done=self._write_ended, before=arrived)
        except (StoreError, OSError, RuntimeError, MemoryError) as error:  # torch reports a lack of memory either way
            self.allowance.give_back(nbytes)
            self._complain(f"a write could not be queued ({error}); tensors stay in memory")
            return _policy.NOT_WRITTEN
        finally:
            self._sending = False
        record.write = ticket
        record.state = WRITING
        self._in_flight[ticket] = record.ref
        if nbytes > self._largest_bytes:
            self._learn_size(nbytes)
        staging.depart(nbytes)
        self.counters.staging_peak_bytes = staging.peak_bytes
        return None

    def _write_ended(self, ticket: Ticket) -> None:
        """On the worker: a write has ended."""
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
        while self.ended and self.lock.acquire(blocking=False):
            try:
                self.land()
            finally:
                self.lock.release()

    def land(self) -> None:
        """Give back the memory of what has been written."""
        while self.ended:
            ticket = self.ended.popleft()
            reference = self._in_flight.pop(ticket)
            self.staging.land(ticket.nbytes)
            self.counters.written_bytes += ticket.moved_bytes
            record = reference()
            if self.trace is not None:
                label = record.name() if record is not None else "dropped"
                self.trace.append(TraceEvent("write", ticket.started_s, ticket.ended_s, ticket.nbytes, label))
            if record is not None and record.state is WRITING:
                self._settle_write(record, ticket)

    def _settle_write(self, record: Record, ticket: Ticket) -> None:
        alias = record.alias
        assert alias is not None
        assert self.store is not None
        storage = alias.untyped_storage()
        if self._moved(record, storage):
            self._take_back(record, _MOVED)
        elif record.is_edited():
            self._poison(record)
        elif ticket.error is not None:
            self._take_back(record, _policy.NOT_WRITTEN)
            self._complain(f"the write of {record.name()} failed ({ticket.error}); it stays in memory")
        elif (there := self.store.resident(ticket.location)) is not None and there.owner is alias:
            self._take_back(record, _policy.IN_HOST)  # the store keeps it where it is instead of copying
        elif record.wanted:
            record.state = HELD
        else:
            alone = storage_use_count(storage._cdata) <= _OURS_ALONE
            del storage
            record.drop_alias()
            record.state = STORED
            if alone:
                record.alias = None
            else:
                self.unconfirmed.append(record.ref)

    def confirm(self) -> None:
        """At a hook: see whether anything written was edited before its copy was finished."""
        unconfirmed, self.unconfirmed = self.unconfirmed, []
        for reference in unconfirmed:
            record = reference()
            if record is None or record.alias is None or record.state in IN_MEMORY:
                continue
            if record.is_edited():
                self._poison(record)
            else:
                record.alias = None

    def take_back(self, record: Record) -> bool:
        """Cancel a queued write: the bytes stay in memory. False if it is running or done; it is `wanted` then."""
        ticket = record.write
        if ticket is not None and self._cancel(ticket):
            self._give_back(record)
            record.state = HELD
            return True
        record.wanted = True
        return False

    def drop(self, record: Record) -> None:
        """Let go of bytes that are in the store too."""
        if record.state is HELD and record.write is not None:
            if record.alias is not None and record.is_edited():
                self._poison(record)  # when the edit was made, during the write or after, nobody can tell any more
                return
            record.drop_alias()
            record.alias = None
            record.wanted = False
            record.state = STORED
        elif record.state is RESTORED:
            record.restored = record.given = record.ready = None
            record.state = STORED

    def discard(self, ticket: Ticket) -> None:
        """A dead record's place in the store is free again."""
        if self.store is not None:
            if not ticket.done():
                self._cancel(ticket)
            self.store.discard(ticket)

    # -- back ----------------------------------------------------------------------------------------------------

    def read_ahead_bytes(self, held_bytes: int) -> int:
        """What may be read back and ahead now, while so much is held: that is wanted before what was written."""
        return min(self.window_bytes - held_bytes, self._read_ahead_bytes)

    def fetch(self, record: Record) -> None:
        """Queue the read of a stored record. Raises ClosedError."""
        assert record.write is not None
        if self.closed or self.store is None:
            raise ClosedError(
                f"backward asked for {record.name()}, but its Offloader was closed and the stored bytes are gone; "
                "close it only after the last backward of its graphs"
            )
        location = record.write.location
        there = self.store.resident(location)
        if record.stream is not None and there is not None:
            self.counters.read_bytes += record.nbytes
            self._restore(record, _streams.host_bytes(there.owner))
            return
        try:
            before = None
            if record.stream is not None and self._direct(record.nbytes):
                record.view, record.ready, buffer, before = _direct.borrow(record.nbytes, record.device)
            else:
                memory = self.memory.of(record.device, self.store.alignment)
                skew = location.skew if there is None else there.address % memory.alignment
                record.view, buffer = memory.lease(record.nbytes, skew)
            record.read = self.store.read(location, buffer, on_done=self._read_ended, before=before)
        except (StoreError, OSError, RuntimeError, MemoryError) as error:
            record.view = record.ready = None
            raise TransferError(f"{record.name()} ({record.nbytes} bytes) could not be read back: {error}") from error
        record.state = READING

    def await_read(self, record: Record) -> None:
        """Without the lock: wait for a record's read, however late. Raises TransferError, StalledError."""
        ticket = record.read
        if ticket is None:
            return
        begun_s = time.perf_counter()
        try:
            ended = -1
            while not ticket.wait(self.limits.timeout_s):
                if self._reads_ended != ended:  # others were ahead in the queue, and the device moves
                    ended = self._reads_ended
                    continue
                raise StalledError(
                    f"{record.name()} ({record.nbytes} bytes) was not read back within {self.limits.timeout_s:g} s; "
                    "the device has stalled (TBA_IO_TIMEOUT sets how long to wait)"
                )
        except StoreError as error:
            if not ticket.done():  # nothing moves any more, or nobody has it
                raise StalledError(
                    f"{record.name()} ({record.nbytes} bytes) was not read back: {error} (TBA_IO_TIMEOUT sets how long "
                    "to wait)"
                ) from error
            return  # `arrive` tells, with the lock
        finally:
            ended_s = time.perf_counter()
            with self.lock:
                self.counters.wait_s += ended_s - begun_s
                if self.trace is not None:
                    self.trace.append(TraceEvent("wait", begun_s, ended_s, record.nbytes, record.name()))

    def _read_ended(self, ticket: Ticket) -> None:
        self._reads_ended += 1  # only ever compared for change, so a lost update does no harm

    def arrive(self, record: Record) -> None:
        """Turn a read that has ended into a restored tensor. Raises TransferError."""
        ticket, kept = record.read, record.view
        if record.state is not READING or ticket is None or not ticket.done():
            return
        record.read = record.view = None
        record.state = STORED  # until the bytes are where they belong: a later unpack may try again
        if ticket.error is not None:
            self.counters.errors += 1
            raise TransferError(
                f"{record.name()} ({record.nbytes} bytes) could not be read back: {ticket.error}"
            ) from ticket.error
        self.counters.read_bytes += ticket.moved_bytes
        if self.trace is not None:
            self.trace.append(TraceEvent("read", ticket.started_s, ticket.ended_s, record.nbytes, record.name()))
        plain = record.stream is None and record.encoded is None
        self._restore(record, _streams.host_bytes(kept, record.label[0] if plain else torch.uint8))

    def _restore(self, record: Record, host: Tensor) -> None:
        memory = None if record.stream is None else self.memory.of(record.device)
        restored, arrival = _streams.into(host, record.device, memory)
        record.restored = restored if memory is None else restored.data  # whose counter does not count the copy
        record.ready = arrival or record.ready  # read into device memory, it has been ready since `fetch`
        record.state = RESTORED

    # -- both ----------------------------------------------------------------------------------------------------

    def trim(self) -> None:
        """Once a step: give back memory and disk blocks that the last one did not use."""
        self.memory.trim()
        if self.store is not None and not self.closed:
            self.store.trim()

    def _learn_size(self, largest_bytes: int) -> None:
        """Of what was sent: what may be held back from writing, and read ahead, depends on it."""
        self._largest_bytes = largest_bytes
        self.window_bytes = _policy.window_bytes(self.limits, largest_bytes)
        self._read_ahead_bytes = _policy.read_ahead_bytes(self.window_bytes, largest_bytes)

    def _prepare(self, record: Record, alias: Tensor) -> tuple[Buffer, Callable[[], None] | None]:
        """What to write, and what to wait for before."""
        begin, nbytes, stream = record.begin, record.nbytes, record.stream
        if stream is None:
            return _streams.out(alias, begin, nbytes, stream, None)
        if self._direct(nbytes):
            return _direct.lend(alias, begin, nbytes, stream)
        assert self.store is not None
        return _streams.out(alias, begin, nbytes, stream, self.memory.of(record.device, self.store.alignment))

    def _direct(self, nbytes: int) -> bool:
        """Whether the store moves so much device memory itself. Small transfers are cheaper through host memory."""
        store = self.store
        return store is not None and store.takes_device_memory and nbytes >= store.threshold_bytes

    def _cancel(self, ticket: Ticket) -> bool:
        """Cancel a queued write; False if it is running or done."""
        if not ticket.cancel():
            return False
        del self._in_flight[ticket]
        self.staging.land(ticket.nbytes)
        self.allowance.give_back(ticket.nbytes)
        return True

    def close(self) -> None:
        """Give memory back. The store's owner closes that."""
        self.closed = True
        _streams.finish()
        self.memory.close()
        self.allowance.close()

    def file_bytes(self) -> int:
        """Blocks the store occupies."""
        return self.store.allocated_bytes() if self.store is not None and not self.closed else 0

    def _moved(self, record: Record, storage: torch.UntypedStorage) -> bool:
        return storage.data_ptr() != record.address or storage.nbytes() != record.storage_bytes

    def _poison(self, record: Record) -> None:
        record.state = POISONED
        if record.alias is not None and record.alias.untyped_storage().nbytes():
            record.drop_alias()
        record.restored = record.given = record.ready = None

    def _take_back(self, record: Record, reason: str) -> None:
        """The write that has just ended is worthless: the record is what it was in plain PyTorch, an alias."""
        self._give_back(record)
        record.state = HELD
        self.counters.kept_to_offloaded(-record.logical_bytes * record.offloaded, reason)  # once, if it fails again
        record.offloaded = False

    def _give_back(self, record: Record) -> None:
        ticket, record.write = record.write, None
        assert self.store is not None
        if ticket is not None:
            self.store.discard(ticket)

    def _complain(self, text: str) -> None:
        self.counters.errors += 1
        if not self._warned:
            self._warned = True
            warn(f"offloading: {text}")
