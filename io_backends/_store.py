"""Store: the base class of a place for bytes.

Guarantees of every store (`io_backends.testing.check_store` tests them):

1. `write` and `read` return at once. The work happens on a thread of the store, unless there is none to do.
2. A ticket keeps its buffer's owner alive until the transfer has ended, and no longer.
3. A transfer moves every byte, or ends with an error that `wait` raises.
4. `on_done` runs once, on the thread that ended the transfer, before any waiter wakes; not for a cancelled one.
5. `discard` may be called at any time: a location is reused only after all writes to it have ended.

Assumption: the memory of a submitted buffer is freed only by dropping its owner.
"""

from __future__ import annotations

import abc
from collections import deque
from typing import Any

from ._buffer import Buffer, on_device
from ._ticket import Before, OnDone, Ticket


class Store(abc.ABC):
    """A place for bytes. Thread-safe.

    A store implements the abstract methods. The other defaults suit a store of host memory without blocks.
    """

    @property
    def alignment(self) -> int:
        """Bytes. A read into a padded buffer whose address equals the write's modulo this needs no copy. Default: 1."""
        return 1

    @property
    def takes_device_memory(self) -> bool:
        """Whether a buffer may be memory of a CUDA device. Default: no."""
        return False

    @property
    def threshold_bytes(self) -> int:
        """Device memory of fewer bytes is cheaper to move through host memory. Default: 0."""
        return 0

    @property
    def spills(self) -> deque[Ticket] | None:
        """Writes to a lower level that have ended, for a reader to take out. Default: None, there is no such level."""
        return None

    def write(self, memory: Any, *, on_done: OnDone = None, before: Before = None) -> Ticket:
        """Queue a write of `memory`: a Buffer, or any object that `Buffer.of` takes.

        The ticket's `location` is known once the write has succeeded.

        Args:
            memory: what to write; must not change before the write has ended.
            on_done: called with the ticket when the transfer ends.
            before: runs on the worker just before the transfer (it may wait for a device).

        Raises:
            StoreClosed: the store is closed.
            StoreBroken: the write cannot be queued. The ticket carries all later errors.
            TypeError, ValueError: from `Buffer.of`; or the memory is on a device that this store cannot reach.
        """
        return self.submit_write(self._buffer(memory), on_done, before)

    def read(self, location: Any, memory: Any, *, on_done: OnDone = None, before: Before = None) -> Ticket:
        """Queue a read of a finished write into `memory` of the same size. Reads overtake queued writes.

        Arguments and errors are those of `write`; ValueError also if the sizes differ or `location` is None.
        """
        buffer = self._buffer(memory, writable=True)
        if location is None:
            raise ValueError("nothing to read there: the write failed, has not ended, or was discarded")
        if buffer.nbytes != location.nbytes:
            raise ValueError(f"asked to read {location.nbytes} bytes into a buffer of {buffer.nbytes}")
        return self.submit_read(location, buffer, on_done, before)

    @abc.abstractmethod
    def submit_write(self, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        """Queue a write. Its location has `nbytes` and `skew`, the address modulo `alignment` to read it back to."""

    @abc.abstractmethod
    def submit_read(self, location: Any, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        """Queue a read of the `location` of a finished write into a buffer of its size."""

    @abc.abstractmethod
    def discard(self, ticket: Ticket) -> None:
        """Free the space of a write; cancel the write if it has not started. Idempotent; never blocks."""

    @abc.abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes that the store occupies now (disk blocks for a file)."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the workers and free everything. Idempotent. Queued transfers fail with `StoreClosed`."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """`close` without waiting, for finalizers: safe on any thread at any bytecode. Idempotent."""

    @property
    def capacity_bytes(self) -> int | None:
        """Most bytes that it may hold at once, counting each write in whole blocks. Default: None, no known limit."""
        return None

    def resize(self, share: float) -> None:  # noqa: B027  # most stores of memory have no limit
        """Hold at most `share` times the `capacity_bytes` that it was made with. Default: nothing, there is no limit.

        What it holds beyond that stays until it is discarded; no write is added to it.
        """

    @property
    def used_bytes(self) -> int:
        """Bytes of writes that have begun and are not discarded. Default: `allocated_bytes()`."""
        return self.allocated_bytes()

    def resident(self, location: Any) -> Buffer | None:
        """The bytes of a finished write for use in place, while the caller holds the buffer's owner. Default: None.

        None if they are not in host memory, or if the location is None.
        """
        return None

    def trim(self) -> None:  # noqa: B027  # most stores of memory have nothing to do
        """Once per training step: free space that the last step did not need. Returns at once. Default: nothing."""

    def _buffer(self, memory: Any, *, writable: bool = False) -> Buffer:
        if type(memory) is Buffer:  # from the engine, which knows what the store takes
            return memory
        buffer = Buffer.of(memory, writable=writable)
        if not self.takes_device_memory and on_device(buffer.owner):
            raise ValueError(
                f"{type(memory).__name__} of {buffer.nbytes} bytes is memory of a CUDA device, and "
                f"{type(self).__name__} moves host memory only: copy it there first, or use KvikioStore"
            )
        return buffer
