"""Errors of the stores.

::

    StoreError                 root; `__cause__` holds the operating system's error, if there was one
    ├── StoreClosed            used after `close()`, or in a forked child: you closed it
    ├── StoreFull              no space left for a write: free some, or use another path
    ├── StoreBroken            the device, the file or a worker failed
    ├── StoreStalled           no byte has moved for too long, and the transfer waited for has not ended
    ├── ShortTransfer          fewer bytes moved than requested, without an error from the system
    ├── Corrupted              the checksums of what was written and what was read differ
    ├── TransferCancelled      a wait for a transfer that was cancelled before it started
    └── WaitEnded              a signal handler raised during a wait; the waiter raises that error
"""

from __future__ import annotations


class StoreError(Exception):
    """Root of all errors raised by a store or carried by a `Ticket`."""


class StoreClosed(StoreError):
    """The store was used after `close()`, or in a forked child."""


class StoreFull(StoreError):
    """The device or its quota has no space left for this write."""


class StoreBroken(StoreError):
    """The device, the file or the worker that owned a transfer failed."""


class StoreStalled(StoreError):
    """No byte of the store moved for its `timeout_s`.

    The transfer is still in flight and keeps its memory; a later `wait` may see it end.
    """


class ShortTransfer(StoreError):
    """The system moved fewer bytes than requested and gave no error."""


class Corrupted(StoreError):
    """Bytes came back different: memory, the device or another process changed them."""


class TransferCancelled(StoreError):
    """The transfer was cancelled before it started."""


class WaitEnded(StoreError):
    """A signal handler raised during a wait. Its error is in `interrupts.kept`, and the transfer continues."""
