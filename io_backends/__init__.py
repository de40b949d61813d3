"""Asynchronous stores for big buffers: bytes, buffers, files, devices, threads; nothing of autograd or models.

    store = PosixStore("/scratch")
    ticket = store.write(Buffer(address, nbytes, owner))
    ...
    store.read(ticket.location, other).wait()
    store.discard(ticket); store.close()

Whoever writes a store reads `Store`'s contract; `io_backends.testing` has the tools to test one.
"""

from ._errors import ShortTransfer, StoreBroken, StoreClosed, StoreError, StoreFull, TransferCancelled
from ._host import HostStore
from ._pool import BufferPool
from ._posix import PosixStore
from ._store import Buffer, Location, Store, Ticket, TicketState
from ._syscalls import Syscalls

__all__ = [
    "Buffer",
    "BufferPool",
    "HostStore",
    "Location",
    "PosixStore",
    "ShortTransfer",
    "Store",
    "StoreBroken",
    "StoreClosed",
    "StoreError",
    "StoreFull",
    "Syscalls",
    "Ticket",
    "TicketState",
    "TransferCancelled",
]
