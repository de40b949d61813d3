"""What whoever writes or uses a store tests it with. Public and pytest-free.

`check_store(make)` holds a store to the contract of `Store`:

check_store(lambda: PosixStore(directory))

`FaultyStore` is a store that is late, fails or corrupts on demand, wrapped around a real one:

def plan(operation, number):            # "write" or "read", counted from 0 each
    if operation == "read" and number == 3:
        return Fault(error=OSError(errno.EIO, "injected"))

store = FaultyStore(PosixStore(directory), plan)
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ._contract import check_store
from ._store import Buffer, Store, Ticket

__all__ = ["Fault", "FaultyStore", "Operation", "check_store"]

Operation = Literal["write", "read"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one transfer, in this order.

    Attributes:
        gate: the transfer starts only once this event is set.
        delay_s: seconds it is late.
        error: raised on the worker instead of the transfer.
        flip_byte: after a read (in the memory read into), the index of a byte whose bits are inverted.
    """

    gate: threading.Event | None = None
    delay_s: float = 0.0
    error: BaseException | None = None
    flip_byte: int | None = None


class FaultyStore:
    """A `Store` that asks `plan(operation, number)` for the fault of each transfer; None means none. Thread-safe."""

    def __init__(self, store: Store, plan: Callable[[Operation, int], Fault | None]) -> None:
        self._store = store
        self._plan = plan
        self._numbers = {"write": itertools.count(), "read": itertools.count()}

    @property
    def alignment(self) -> int:
        return self._store.alignment

    def write(
        self,
        buffer: Buffer,
        *,
        on_done: Callable[[Ticket], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> Ticket:
        fault = self._plan("write", next(self._numbers["write"]))
        if fault is None:
            return self._store.write(buffer, on_done=on_done, before=before)
        return self._store.write(buffer, on_done=on_done, before=_befall(fault, before))

    def read(
        self,
        location: Any,
        buffer: Buffer,
        *,
        on_done: Callable[[Ticket], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> Ticket:
        fault = self._plan("read", next(self._numbers["read"]))
        if fault is None:
            return self._store.read(location, buffer, on_done=on_done, before=before)
        return self._store.read(location, buffer, on_done=_corrupt(fault, on_done), before=_befall(fault, before))

    def discard(self, ticket: Ticket) -> None:
        self._store.discard(ticket)

    def allocated_bytes(self) -> int:
        return self._store.allocated_bytes()

    def trim(self) -> None:
        trim = getattr(self._store, "trim", None)
        if trim is not None:
            trim()

    @property
    def used_bytes(self) -> int:
        return getattr(self._store, "used_bytes", 0)

    def close(self) -> None:
        self._store.close()

    def abandon(self) -> None:
        self._store.abandon()


def _befall(fault: Fault, before: Callable[[], None] | None) -> Callable[[], None]:
    def befall() -> None:
        if before is not None:
            before()
        if fault.gate is not None:
            fault.gate.wait()
        time.sleep(fault.delay_s)
        if fault.error is not None:
            raise fault.error

    return befall


def _corrupt(fault: Fault, on_done: Callable[[Ticket], None] | None) -> Callable[[Ticket], None] | None:
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
