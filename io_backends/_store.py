"""Store: the base class of a place for bytes.

Guarantees every store gives (`io_backends.testing.check_store` holds stores to them):

1. `write` and `read` return at once; the work happens on a thread of the store, unless there is none to do.
2. A ticket keeps its buffer's owner alive until the transfer has ended, and no longer.
3. A transfer either moves every byte or ends with an error that `wait` raises.
4. `on_done` runs once, on the thread that ended the transfer, before any waiter wakes; not for a cancelled one.
5. `discard` may be called at any time: a location is reused only when nothing is written to it any more.

Assumption beneath them: the memory of a submitted buffer is freed by dropping its owner, and in no other way.
"""

from __future__ import annotations

import abc
from collections import deque
from typing import Any

from ._buffer import Buffer, on_device
from ._ticket import Before, OnDone, Ticket


class Store(abc.ABC):
    """A place for bytes. Thread-safe.

    A store implements what is abstract here. All else has a default that suits a store of host memory with no blocks.
    """

    @property
    def alignment(self) -> int:
        """Bytes: a read into a padded buffer whose address equals the write's modulo this needs no copy. Default: 1."""
        return 1

    @property
    def takes_device_memory(self) -> bool:
        """Whether a buffer may be memory of a CUDA device. Default: no."""
        return False

    @property
    def threshold_bytes(self) -> int:
        """Below so many bytes, device memory goes through host memory at less cost. Default: 0."""
        return 0

    @property
    def spills(self) -> deque[Ticket] | None:
        """Writes to a lower level that have ended, for a reader to take out. Default: None, there is no such level."""
        return None

    def write(self, memory: Any, *, on_done: OnDone = None, before: Before = None) -> Ticket:
        """Queue a write of `memory`: a Buffer, or any object that `Buffer.of` takes.

        The ticket's `location` is known once the write has ended well.

        Args:
            memory: what to write; not to be changed before the write has ended.
            on_done: called with the ticket at the transfer's end.
            before: run on the worker just ahead of the transfer (it may wait for a device).

        Raises:
            StoreClosed: the store is closed.
            StoreBroken: it cannot even begin. All later errors are carried by the ticket.
            TypeError, ValueError: of `Buffer.of`; or the memory is a device's, which this store cannot reach.
        """
        return self.submit_write(self._buffer(memory), on_done, before)

    def read(self, location: Any, memory: Any, *, on_done: OnDone = None, before: Before = None) -> Ticket:
        """Queue a read of a finished write into `memory`, whose size is the write's. Goes ahead of queued writes.

        Args and errors are those of `write`; ValueError also where the sizes differ or `location` is None.
        """
        buffer = self._buffer(memory, writable=True)
        if location is None:
            raise ValueError("asked to read what is not there: the write has not ended well, or was discarded")
        if buffer.nbytes != location.nbytes:
            raise ValueError(f"asked to read {location.nbytes} bytes into a buffer of {buffer.nbytes}")
        return self.submit_read(location, buffer, on_done, before)

    @abc.abstractmethod
    def submit_write(self, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        """Queue a write. Its location has `nbytes`, and `skew`: the address modulo `alignment` to read it back to."""

    @abc.abstractmethod
    def submit_read(self, location: Any, buffer: Buffer, on_done: OnDone, before: Before) -> Ticket:
        """Queue a read of the `location` of a finished write into a buffer of its size."""

    @abc.abstractmethod
    def discard(self, ticket: Ticket) -> None:
        """Give back the space of a write, cancelling it if it has not started. Idempotent; never blocks."""

    @abc.abstractmethod
    def allocated_bytes(self) -> int:
        """Blocks the store occupies now (disk blocks for a file), in bytes."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the workers and give everything back. Idempotent. Queued transfers fail with `StoreClosed`."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """`close` without waiting, for finalisers: safe on any thread at any bytecode. Idempotent."""

    @property
    def capacity_bytes(self) -> int | None:
        """Most bytes that it may hold at once, each write in whole blocks. Default: None, it knows no limit."""
        return None

    @property
    def used_bytes(self) -> int:
        """Bytes that belong to writes begun and not yet discarded. Default: `allocated_bytes()`."""
        return self.allocated_bytes()

    def resident(self, location: Any) -> Buffer | None:
        """The bytes of a finished write, to use in place while the buffer's owner is held. Default: None.

        None where they are not in host memory, or where the location is None.
        """
        return None

    def trim(self) -> None:  # noqa: B027  # most stores of memory have nothing to do
        """Once a training step: give back space that the last step did not need. Returns at once. Default: nothing."""

    def _buffer(self, memory: Any, *, writable: bool = False) -> Buffer:
        if type(memory) is Buffer:  # the engine's: it knows what a store takes
            return memory
        buffer = Buffer.of(memory, writable=writable)
        if not self.takes_device_memory and on_device(buffer.owner):
            raise ValueError(
                f"{type(memory).__name__} of {buffer.nbytes} bytes is memory of a CUDA device, and "
                f"{type(self).__name__} moves host memory only: copy it there first, or use KvikioStore"
            )
        return buffer
