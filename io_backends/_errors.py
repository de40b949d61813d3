"""Errors of the stores.

::

    StoreError                 root; `__cause__` holds the operating system's error where there was one
    ├── StoreClosed            used after `close()`, or in a forked child: you closed it
    ├── StoreFull              no space left for a write: free some, or use another path
    ├── StoreBroken            the device, the file or a worker failed
    ├── StoreStalled           no byte has moved for too long; the transfer waited for has not ended
    ├── ShortTransfer          fewer bytes moved than asked, with no error from the system
    ├── Corrupted              what was read is not what was written: the checksums differ
    ├── TransferCancelled      waited for a transfer that was cancelled before it started
    └── WaitEnded              a signal's handler has raised in a wait: who has waited raises that error
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
    """No byte of the store moved for as long as its `timeout_s` allows.

    The transfer waited for is still under way and keeps its memory; a later `wait` may yet see it end.
    """


class ShortTransfer(StoreError):
    """The system moved fewer bytes than it was asked to and gave no error."""


class Corrupted(StoreError):
    """Bytes came back other than they were written: memory, the device or another process changed them."""


class TransferCancelled(StoreError):
    """The transfer waited for was cancelled before it started."""


class WaitEnded(StoreError):
    """A handler of the program has raised in a wait; its error is in `interrupts.kept`, the transfer goes on."""
