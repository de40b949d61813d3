"""What the tests of striped stores share: disks that fail on demand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from io_backends import PosixStore, Syscalls, Ticket
from support.stores import Pieces

REAL = Syscalls()
NBYTES = 100_000


class Disk:
    """A file store whose system calls fail on demand, with `code`, above the size of a store's first probing."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.code = 0
        self.calls = 0

        def pwritev(fd: int, pieces: Pieces, offset: int) -> int:
            if sum(length for _, length in pieces) > 4096:
                self.calls += 1
                if self.code:
                    raise OSError(self.code, os.strerror(self.code))
            return REAL.pwritev(fd, pieces, offset)

        self.store = PosixStore(directory, syscalls=Syscalls(pwritev=pwritev), **settings)


def index_of(ticket: Ticket) -> int:
    return int(ticket.location.store_index)
