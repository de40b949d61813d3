"""Tools to test a store. Public and pytest-free.

`check_store(make)` tests a store against the contract of `Store`:

    check_store(lambda: PosixStore(directory))

`FaultyStore` wraps a store and delays, fails or corrupts transfers on demand:

    def plan(operation, number):            # "write" or "read", each counted from 0
        if operation == "read" and number == 3:
            return Fault(error=OSError(errno.EIO, "injected"))

    store = FaultyStore(PosixStore(directory), plan)
"""

from __future__ import annotations

from ._testing.contract import check_store
from ._testing.faulty import Fault, FaultyStore, Operation

__all__ = ["Fault", "FaultyStore", "Operation", "check_store"]
