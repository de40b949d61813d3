"""HeapPool: leases from the process's heap, for an allocator that keeps the pages of what is freed.

Such a heap stays as large as it ever was. A pool with pages of its own would come on top of it, although backward has
just freed about as much in the heap as it reads back.

Guarantees: those of `BufferPool`; each lease has memory of its own, which goes back to the heap with its last view.
"""

from __future__ import annotations

import numpy as np

from .pool import BufferPool, Mapping, address_of


class HeapPool(BufferPool):
    """Leases from the heap. Thread-safe.

    Args:
        alignment: bytes; a page or a multiple of it for leases that files are read into.
    """

    def __init__(self, alignment: int) -> None:
        super().__init__(alignment)

    def _is_alone(self, length: int) -> bool:
        return True

    def _map(self, nbytes: int) -> tuple[Mapping | None, memoryview]:
        memory = np.empty(nbytes + self.alignment, np.uint8).data  # not zeroed
        begin = -address_of(memory) % self.alignment
        return None, memory[begin : begin + nbytes]
