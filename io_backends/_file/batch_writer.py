"""BatchWriter: moves several queued writes by one system call.

A worker that sleeps in a transfer and wakes again costs a busy core more than a transfer of 1 or 2 MiB does: it finds
the caches cold and waits for the GIL.

Guarantees:

1. Each write has its own extent, as if it had gone alone; the extents happen to be adjacent. Its `moved_bytes` do not
   count what fills the rest of an extent's last page.
2. All of them move, or `write` raises and nothing has changed. Each is then written alone and fails with its own error.
3. At most `MOST_BYTES` and `MOST_TICKETS` go together, so none waits long for the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from .._buffer import Buffer, Location
from .._errors import ShortTransfer
from .._extents import align_up
from .._ticket import Ticket
from . import layout
from .checksum import Digest
from .scratch import ScratchFile
from .space import EXTENT_ALIGNMENT, Space, extent_of
from .syscalls import Syscalls

MOST_BYTES = 16 << 20
MOST_TICKETS = 64  # four pieces each at most, and the system takes 1024


class BatchWriter:
    """Batched writes to a store's scratch file.

    Args:
        open_file: returns that file.
        space: of the file.
        syscalls: to write with.
        memory: returns the address of that many bytes of the calling worker's own, page-aligned.
        digest: checksum of what is written.
    """

    def __init__(
        self,
        open_file: Callable[[], ScratchFile],
        space: Space,
        syscalls: Syscalls,
        memory: Callable[[int], int],
        digest: Digest,
    ) -> None:
        self._open_file = open_file
        self._space = space
        self._syscalls = syscalls
        self._memory = memory
        self._digest = digest

    def takes(self, tickets: Sequence[Ticket], another: Ticket) -> bool:
        if not another.nbytes or another.waits:
            return False
        nbytes = another.nbytes + sum(ticket.nbytes for ticket in tickets)
        return nbytes <= MOST_BYTES and len(tickets) < MOST_TICKETS

    def write(self, tickets: Sequence[Ticket]) -> None:
        file, space = self._open_file(), self._space
        locations = [extent_of(ticket, file.alignment) for ticket in tickets]
        buffers = [ticket.buffer for ticket in tickets if ticket.buffer is not None]  # all have one until written
        checksums = [None if each.shared else self._digest(each.address, each.nbytes) for each in buffers]
        length = sum(location.length for location in locations)
        offset = space.take(length)
        try:
            space.reserve(file.fd, offset + length)
            moved = self._syscalls.pwritev(file.fd, self._pieces(buffers, locations, file.alignment), offset)
            if moved != length:
                raise ShortTransfer(f"{moved} of {length} bytes moved")
        except BaseException:
            space.give_back(offset, length)
            raise
        for ticket, location, checksum in zip(tickets, locations, checksums, strict=True):
            ticket.location = location._replace(offset=offset, checksum=checksum)
            ticket.moved_bytes = align_up(location.skew + location.nbytes, file.alignment)
            offset += location.length

    def _pieces(self, buffers: Sequence[Buffer], locations: Sequence[Location], block: int) -> list[layout.Piece]:
        filler = self._memory(EXTENT_ALIGNMENT + 2 * block * MOST_TICKETS)
        bounce = filler + EXTENT_ALIGNMENT
        pieces: list[layout.Piece] = []
        for buffer, location in zip(buffers, locations, strict=True):
            length = align_up(location.skew + location.nbytes, block)
            vector, edges = layout.vector(buffer.address, location.skew, location.nbytes, block, bounce)
            for inside, outside, nbytes in edges:
                ctypes.memmove(inside, outside, nbytes)
            pieces += vector
            if length < location.length:  # an extent ends at a page, a lone write at a block
                pieces.append((filler, location.length - length))
            bounce += 2 * block
        return pieces
