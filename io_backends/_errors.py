"""Errors of the stores.

::

    StoreError                 root; `__cause__` holds the operating system's error where there was one
    ├── StoreClosed            used after `close()`, or in a forked child: you closed it
    ├── StoreFull              no space left for a write: free some, or use another path
    ├── StoreBroken            the device, the file or a worker failed
    ├── ShortTransfer          fewer bytes moved than asked, with no error from the system
    └── TransferCancelled      waited for a transfer that was cancelled before it started
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


class ShortTransfer(StoreError):
    """The system moved fewer bytes than it was asked to and gave no error."""


class TransferCancelled(StoreError):
    """The transfer waited for was cancelled before it started."""
