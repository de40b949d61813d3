"""Device memory as seen by a file store: recognise it, hand it over, and keep what is registered for direct transfers.

Registering memory with the driver costs milliseconds, so it is done once for a whole allocation that is used again and
again, not for each transfer. What is registered must not be freed: the driver would go on moving bytes to pages that
belong to somebody else by then. Therefore the registry holds the owner of each allocation until it is deregistered.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from ._store import Buffer


class View:
    """`nbytes` at `address` for whoever takes arrays: of a device (`cuda`) or of the host. It owns nothing."""

    def __init__(self, address: int, nbytes: int, *, cuda: bool) -> None:
        interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}
        if cuda:
            self.__cuda_array_interface__ = interface
        else:
            self.__array_interface__ = interface


def view(address: int, nbytes: int, *, cuda: bool) -> Any:
    """An array over memory, without a copy. Whoever uses it keeps the memory alive."""
    memory = View(address, nbytes, cuda=cuda)
    return memory if cuda else np.asarray(memory)


def on_device(owner: object) -> bool:
    """Whether a buffer is memory of a CUDA device: its owner then offers `__cuda_array_interface__`."""
    try:
        return getattr(owner, "__cuda_array_interface__", None) is not None
    except Exception:  # a tensor on a device that requires grad, or of a type numpy lacks, has one but does not show it
        return True


class _Allocation:
    __slots__ = ("buffer", "users")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.users = 0

    def holds(self, address: int) -> bool:
        return self.buffer.address <= address < self.buffer.address + self.buffer.nbytes


class Registry:
    """Allocations registered with a driver, bounded in bytes; the one not used for the longest makes way. Thread-safe.

    `register` and `deregister` take an array over the allocation and raise where the driver refuses.
    """

    def __init__(self, register: Callable[[Any], None], deregister: Callable[[Any], None], budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._register = register
        self._deregister = deregister
        self._lock = threading.Lock()
        self._allocations: OrderedDict[int, _Allocation] = OrderedDict()  # by address, the last used last

    @property
    def registered_bytes(self) -> int:
        return sum(allocation.buffer.nbytes for allocation in list(self._allocations.values()))

    def add(self, buffer: Buffer) -> bool:
        """Register a whole allocation and hold its owner. False if the driver or the budget does not allow it."""
        with self._lock:
            known = self._allocations.get(buffer.address)
            if known is not None and known.buffer.nbytes == buffer.nbytes:
                self._allocations.move_to_end(buffer.address)
                return True
            if known is not None or not self._make_room(buffer.nbytes):
                return False
            try:
                self._register(view(buffer.address, buffer.nbytes, cuda=True))
            except Exception:  # for instance no space in the window through which the device is reached
                return False
            self._allocations[buffer.address] = _Allocation(buffer)
            return True

    @contextmanager
    def using(self, address: int) -> Iterator[None]:
        """The allocation around `address`, if it is registered, stays so inside."""
        with self._lock:
            found = next((one for one in self._allocations.values() if one.holds(address)), None)
            if found is not None:
                found.users += 1
                self._allocations.move_to_end(found.buffer.address)
        try:
            yield
        finally:
            if found is not None:
                with self._lock:
                    found.users -= 1

    def clear(self) -> None:
        """Deregister all. Nothing may be in use. No lock: a finaliser may call this."""
        with suppress(KeyError):
            while True:
                self._end(self._allocations.popitem(last=False)[1])

    def forget(self) -> None:
        """In a forked child, where the driver must not be called."""
        self._lock = threading.Lock()
        self._allocations = OrderedDict()

    def _make_room(self, nbytes: int) -> bool:
        if nbytes > self.budget_bytes:
            return False
        idle = [address for address, allocation in self._allocations.items() if not allocation.users]
        while self.registered_bytes + nbytes > self.budget_bytes:
            if not idle:
                return False
            self._end(self._allocations.pop(idle.pop(0)))
        return True

    def _end(self, allocation: _Allocation) -> None:
        buffer = allocation.buffer
        with suppress(Exception):  # a driver that has ended has forgotten it
            self._deregister(view(buffer.address, buffer.nbytes, cuda=True))
