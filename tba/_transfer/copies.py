"""Copies: what is on its way out of a device, and what becomes of it once the device has got so far.

Guarantees:

1. Nobody sleeps until the device has got so far. Hooks ask (`over`) as they come by. While none comes, a thread asks
   every 10 ms, as long as there is something to ask for.
2. Of each device only the copy that was queued first is asked for: a device's copies end in that order.
3. The write of a copy begins when the copy is over, so a worker of a store that waits never waits for a device. A
   device that stands still (a straggler among ranks, a compilation) is therefore no disk that has stalled.

Wants the engine's lock held, but for the thread, which takes it if it is free: whoever has it asks for itself.
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

# How often the thread asks, and after how many times without a copy it ends: one for each step would cost more.
PERIOD_S = 0.01
LINGERS = 20


class Unbegun(Ticket):
    """Stands for a write until the store has it: whoever takes the record back meanwhile cancels this."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer, None, _never)


def _never(ticket: Ticket) -> None:
    raise AssertionError("a write was run that the store does not have")


class Copy(NamedTuple):
    """One copy under way, or one wait for the kernels that use memory which a store moves itself.

    Attributes:
        ticket: the record's, until there is that of the store.
        record: a weak reference.
        buffer: what will be written.
        departure: tells whether the device has got so far.
        frees: whether the device's own memory is free then, as the bytes are in host memory.
    """

    ticket: Unbegun
    record: weakref.ref[Record]
    buffer: Buffer
    departure: Departure
    frees: bool


class Copies:
    """The copies of one engine.

    Attributes:
        watched: whether a thread asks for them.
        used: whether there has ever been one.
        count: how many are under way; hooks look at it for each saved tensor.
    """

    def __init__(self) -> None:
        self.watched = self.used = False
        self.count = 0
        self._queues: dict[torch.device, deque[Copy]] = {}

    def add(self, copy: Copy, device: torch.device) -> None:
        """Add one that has been queued on a device."""
        self.used = True
        self.count += 1
        self._queues.setdefault(device, deque()).append(copy)

    def over(self) -> Iterator[Copy]:
        """Give, one by one, those that are over."""
        for queue in list(self._queues.values()):
            while queue and queue[0].departure.over():
                copy = queue.popleft()
                self.count -= 1
                yield copy

    def give_up(self) -> list[Copy]:
        """Give all, over or not, and forget them."""
        copies = [copy for queue in self._queues.values() for copy in queue]
        for queue in self._queues.values():  # `over` may be at one of them, as a finaliser may close
            queue.clear()
        self.count = 0
        return copies

    def watch(self, watched: bool) -> None:
        """Note whether a thread asks for them."""
        self.watched = watched
