"""Buffers: the memory that a record's bytes are written from and read into.

::

               a CPU's tensor             a device's
    out        its own memory             pinned host memory, copied to on a stream of its own; or its own memory
    back       pageable host memory,      pinned host memory, copied from on a stream of its own; or
               which then backs it        device memory, which then backs it

A device's own memory is used if the store moves it itself (GPUDirect). Small transfers are cheaper through host memory.

Assumption: the caller keeps what is returned until the transfer has ended. A buffer keeps its memory alive and, for a
device's tensor, the copies in flight (`streams.Departure`, `streams.Arrival`).

Must be called with the engine's lock held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from io_backends import Buffer, BufferPool, Store, StoreFull, interrupts

from .._device import streams
from .._memory.host_pools import HostMemory
from .._record.record import READING, Record

Wait = Callable[[], None]
_Leased = TypeVar("_Leased")
_PERIOD_S = 0.0005  # how often a device is asked for its copies


class Buffers:
    """Memory for the transfers of one engine, from `memory` unless it is the tensors' own.

    A full pool is waited for, until copies of a device from there are over, for at most `timeout_s`.
    """

    def __init__(self, memory: HostMemory, timeout_s: float) -> None:
        self._memory = memory
        self._timeout_s = timeout_s
        self._host: BufferPool | None = None  # for CPU tensors, once made: a lookup would cost each read

    def out(
        self, record: Record, alias: Tensor, store: Store, *, timed: bool
    ) -> tuple[Buffer, streams.Departure | None, bool]:
        """Find what to write, what tells when that may begin, and whether the source's memory is free then.

        `timed`: the device measures how long its copy takes. Raises RuntimeError, MemoryError, StoreFull.
        """
        begin, nbytes, stream = record.begin, record.nbytes, record.stream
        if stream is None:
            buffer, departure = streams.out(alias, begin, nbytes, stream, None)
            if record.logical_bytes < nbytes and not record.is_whole():  # others may edit the gaps
                buffer = buffer._replace(shared=True)
            return buffer, departure, False
        if store.takes_device_memory and nbytes >= store.threshold_bytes:
            return *streams.lend(alias, begin, nbytes, stream), False
        memory = self._memory.of(record.device, store.alignment)
        try:
            return *streams.out(alias, begin, nbytes, stream, memory, timed=timed), True
        except StoreFull:
            out = partial(streams.out, alias, begin, nbytes, stream, memory, timed=timed)
            return *_wait_for_room(memory, out, self._timeout_s), True

    def back(
        self, record: Record, store: Store, host: Buffer | None, *, asked: bool
    ) -> tuple[memoryview | Tensor, Buffer, object, Wait | None]:
        """Find where to read a record to; `host`: where the store has it in memory, if so.

        `asked`: backward waits for it. Where the pool has no room it then waits for the device's copies from there; if
        that is not enough it gets memory of its own, beyond the pool's budget by this one record.

        Returns the bytes, the buffer over them, what `streams.use` takes for them (None: nothing) or the device memory
        that they are to be copied into, and what to call before they are used. That memory is allocated now: when the
        bytes have come, the device has more queued, and the copy would wait for that.

        Raises RuntimeError, MemoryError, StoreFull.
        """
        nbytes, ticket = record.nbytes, record.write
        assert ticket is not None
        if record.stream is not None and store.takes_device_memory and nbytes >= store.threshold_bytes:
            view, ready, buffer, before = streams.borrow(nbytes, record.device)
            return view, buffer, ready, before
        memory = self._host if record.stream is None else None
        if memory is None:
            memory = self._memory.of(record.device, store.alignment)
            if record.stream is None:
                self._host = memory
        skew = ticket.location.skew if host is None else host.address % memory.alignment
        try:
            leased, buffer = memory.lease(nbytes, skew)
        except StoreFull:
            if not asked:
                raise
            leased, buffer = self._lease_late(memory, nbytes, skew)
        return leased, buffer, None if record.stream is None else streams.target(nbytes, record.device), None

    def _lease_late(self, memory: BufferPool, nbytes: int, skew: int) -> tuple[memoryview, Buffer]:
        """Lease of a pool that was full, or memory of its own."""
        try:
            return _wait_for_room(memory, partial(memory.lease, nbytes, skew), self._timeout_s)
        except StoreFull:
            return BufferPool(memory.alignment).lease(nbytes, skew)

    def restore(self, record: Record, found: memoryview | Tensor, *, timed: bool = False) -> streams.Arrival | None:
        """Give a record its bytes, `found` in a lease or a tensor's memory; a device's are copied from there.

        Returns the copy; with `timed`, it tells how long it took. Raises RuntimeError if the device has no memory.
        """
        plain = record.stream is None and record.encoded is None
        host = streams.host_bytes(found, record.label[0] if plain else torch.uint8)
        memory = None if record.stream is None else self._memory.of(record.device)
        try:
            taken = record.ready if isinstance(record.ready, streams.Target) else None
            restored, arrival = streams.into(host, record.device, memory, taken=taken, timed=timed)
        except BaseException:
            if record.state is READING:
                record.read_failed()
            raise
        record.restore(restored if memory is None else restored.data, arrival)  # `.data` resets the version
        return arrival


def _wait_for_room(memory: BufferPool, lease: Callable[[], _Leased], timeout_s: float) -> _Leased:
    """Lease of a pool that was full, once copies that the device still has to make from there are over.

    A program launches ahead of its device, in backward by as many copies as the pool has room for. The device goes on
    whoever holds the engine's lock, unless it waits for another rank or thread: there is an end to this, and a signal
    ends it too. A device that computes is no slow tier, so the wait is not counted as one. Raises StoreFull.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        retains = memory.retains
        try:
            return lease()
        except StoreFull:
            if not retains or interrupts.pending or time.monotonic() > until_s:
                raise
        time.sleep(_PERIOD_S)
