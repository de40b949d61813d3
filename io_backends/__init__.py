"""Asynchronous stores for large buffers. Knows bytes, buffers, files, devices and threads, but not autograd or models.

    from io_backends import PosixStore

    store = PosixStore("/scratch")
    ticket = store.write(array)                      # a NumPy array, a torch tensor, a CuPy array, a Buffer ...
    ticket.wait()
    store.read(ticket.location, other).wait()
    store.discard(ticket)
    store.close()

`Store` is the contract for your own stores; `io_backends.testing` tests one.
"""

from . import _armed
from ._buffer import Buffer, Location
from ._errors import (
    Corrupted,
    ShortTransfer,
    StoreBroken,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreStalled,
    TransferCancelled,
)
from ._file.syscalls import Syscalls
from ._memory.arena import HostArena
from ._memory.heap import HeapPool
from ._memory.numa import device_node, pci_address
from ._memory.pool import BufferPool
from ._store import Store
from ._stores.host import HostStore
from ._stores.kvikio import KvikioStore
from ._stores.posix import PosixStore
from ._stores.striped import StripedLocation, StripedStore
from ._stores.two_level import TwoLevelStore
from ._ticket import Ticket, TicketState
from ._workers.fork import ForkAware

__all__ = [
    "Buffer",
    "BufferPool",
    "Corrupted",
    "ForkAware",
    "HeapPool",
    "HostArena",
    "HostStore",
    "KvikioStore",
    "Location",
    "PosixStore",
    "ShortTransfer",
    "Store",
    "StoreBroken",
    "StoreClosed",
    "StoreError",
    "StoreFull",
    "StoreStalled",
    "StripedLocation",
    "StripedStore",
    "Syscalls",
    "Ticket",
    "TicketState",
    "TransferCancelled",
    "TwoLevelStore",
    "device_node",
    "pci_address",
]

_armed.end()
