"""Copies: what is being copied out of a device, and what happens to it once the device has finished.

Guarantees:

1. Nobody sleeps until the device has finished. Hooks ask (`over`) when they run. While none runs, a thread asks every
   10 ms, as long as there is something to ask about.
2. Only the oldest copy of each device is asked about: a device's copies end in order.
3. The write of a copy begins when the copy is over, so a store's worker never waits for a device. So a device that
   pauses (a straggler among ranks, a compilation) does not look like a stalled disk.

Must be called with the engine's lock held, except by the thread, which takes it if it is free; whoever holds it asks
itself.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from io_backends import Buffer, Ticket

from .._device.streams import Departure
from .._record.record import Record

# How often the thread asks, and after how many times without a copy it ends: a new thread per step would cost more.
PERIOD_S = 0.01
LINGERS = 20


class Unbegun(Ticket):
    """Stands in for a write until the store has it: whoever takes the record back meanwhile cancels this."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer, None, _never)


def _never(ticket: Ticket) -> None:
    raise AssertionError("a write was run that the store does not have")


class Copy(NamedTuple):
    """One copy in flight, or one wait for kernels that use memory which a store moves itself.

    Attributes:
        ticket: the record's, until the store's exists.
        record: a weak reference.
        buffer: what will be written.
        departure: tells whether the device has finished.
        frees: the device's own memory is free then, because the bytes are in host memory.
    """

    ticket: Unbegun
    record: weakref.ref[Record]
    buffer: Buffer
    departure: Departure
    frees: bool


class Copies:
    """The copies of one engine.

    Attributes:
        watched: a thread asks about them.
        used: there has been one.
        count: how many are in flight; hooks read it for each saved tensor.
    """

    def __init__(self) -> None:
        self.watched = self.used = False
        self.count = 0
        self._queues: dict[torch.device, deque[Copy]] = {}

    def add(self, copy: Copy, device: torch.device) -> None:
        self.used = True
        self.count += 1
        self._queues.setdefault(device, deque()).append(copy)

    def over(self) -> Iterator[Copy]:
        """Yield, one by one, those that are over."""
        for queue in list(self._queues.values()):
            while queue and queue[0].departure.over():
                copy = queue.popleft()
                self.count -= 1
                yield copy

    def give_up(self) -> list[Copy]:
        """Return all, over or not, and forget them."""
        copies = [copy for queue in self._queues.values() for copy in queue]
        for queue in self._queues.values():  # not replaced: a finalizer may close while `over` iterates
            queue.clear()
        self.count = 0
        return copies

    def watch(self, watched: bool) -> None:
        self.watched = watched
