"""Tools to test a store with. Public and pytest-free.

`check_store(make)` holds a store to the contract of `Store`:

    check_store(lambda: PosixStore(directory))

`FaultyStore` is a store that is late, fails or corrupts on demand, wrapped around a real one:

    def plan(operation, number):            # "write" or "read", counted from 0 each
        if operation == "read" and number == 3:
            return Fault(error=OSError(errno.EIO, "injected"))

    store = FaultyStore(PosixStore(directory), plan)
"""

from __future__ import annotations

from ._testing.contract import check_store
from ._testing.faulty import Fault, FaultyStore, Operation

__all__ = ["Fault", "FaultyStore", "Operation", "check_store"]
