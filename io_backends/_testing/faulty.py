"""FaultyStore: wraps a store and delays, fails or corrupts transfers on demand."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .._buffer import Buffer
from .._store import Store
from .._ticket import Before, OnDone, Ticket

Operation = Literal["write", "read"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Faults of one transfer, in the order in which they happen.

    Attributes:
        gate: the transfer starts only after this event is set.
        delay_s: seconds to delay it.
        error: raised on the worker instead of the transfer.
        flip_byte: index of a byte to invert in memory after a read.
    """

    gate: threading.Event | None = None
    delay_s: float = 0.0
    error: BaseException | None = None
    flip_byte: int | None = None


class FaultyStore(Store):
    """A store that asks `plan(operation, number)` for the fault of each transfer, or None. Thread-safe.

    Everything else is the wrapped store's.
    """

    def __init__(self, store: Store, plan: Callable[[Operation, int], Fault | None]) -> None:
        self._store = store
        self._plan = plan
        self._numbers = {"write": itertools.count(), "read": itertools.count()}

    @property
    def alignment(self) -> int:
        return self._store.alignment

    @property
    def takes_device_memory(self) -> bool:
        return self._store.takes_device_memory

    @property
    def threshold_bytes(self) -> int:
        return self._store.threshold_bytes

    @property
    def spills(self) -> deque[Ticket] | None:
        return self._store.spills

    @property
    def capacity_bytes(self) -> int | None:
        return self._store.capacity_bytes

    def resize(self, share: float) -> None:
        self._store.resize(share)

    @property
    def used_bytes(self) -> int:
        return self._store.used_bytes

    def submit_write(self, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        fault = self._plan("write", next(self._numbers["write"]))
        if fault is not None:
            before = _befall(fault, before)
        return self._store.write(buffer, on_done=on_done, before=before)

    def submit_read(self, location: Any, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        fault = self._plan("read", next(self._numbers["read"]))
        if fault is not None:
            on_done, before = _corrupt(fault, on_done), _befall(fault, before)
        return self._store.read(location, buffer, on_done=on_done, before=before)

    def discard(self, ticket: Ticket) -> None:
        self._store.discard(ticket)

    def allocated_bytes(self) -> int:
        return self._store.allocated_bytes()

    def resident(self, location: Any) -> Buffer | None:
        return self._store.resident(location)

    def trim(self) -> None:
        self._store.trim()

    def close(self) -> None:
        self._store.close()

    def abandon(self) -> None:
        self._store.abandon()


def _befall(fault: Fault, before: Before) -> Callable[[], None]:
    def befall() -> None:
        if before is not None:
            before()
        if fault.gate is not None:
            fault.gate.wait()
        time.sleep(fault.delay_s)
        if fault.error is not None:
            raise fault.error

    return befall


def _corrupt(fault: Fault, on_done: OnDone) -> OnDone:
    index = fault.flip_byte
    if index is None:
        return on_done

    def corrupt(ticket: Ticket) -> None:
        if ticket.buffer is not None and ticket.error is None:
            byte = ctypes.c_ubyte.from_address(ticket.buffer.address + index % ticket.buffer.nbytes)
            byte.value ^= 0xFF
        if on_done is not None:
            on_done(ticket)

    return corrupt
