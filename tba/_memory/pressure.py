"""Memory pressure: ask the C library to return freed memory to the kernel when memory runs short.

The allocator keeps blocks that the engine frees for later tensors. With glibc, the default, freed blocks may lie
between live ones in the heap, where no other process can use them, until this one is killed for lack of memory. So free
memory is read after every few megabytes moved, less often the more there is; below the reserve the allocator is asked
to return what it can. That costs page faults later, so it is done only then. `tba run` starts a program under an
allocator that needs it less.
"""

from __future__ import annotations

from . import free_memory
from .allocator import release

# Bytes that move at least between two readings of free memory: one costs up to 0.2 ms in the middle of a step, 0.3 % of
# the time these bytes take.
LOOK_EVERY_BYTES = 32 << 20
# Free memory may shrink this many times faster than tensors move, and is still seen to reach the reserve.
_TIMES_FASTER = 16


def look_after_bytes(free_bytes: int, reserve_bytes: int) -> int:
    """Bytes that may move until free memory is read again."""
    return max(LOOK_EVERY_BYTES, (free_bytes - reserve_bytes) // _TIMES_FASTER)


class Pressure:
    """Count of bytes moved, which reads free memory once in a while. Guarded by the engine's lock."""

    def __init__(self, reserve_bytes: int) -> None:
        self.reserve_bytes = reserve_bytes
        self._moved_bytes = 0
        self._look_after_bytes = LOOK_EVERY_BYTES

    def moved(self, nbytes: int) -> None:
        """Count bytes that are about to leave memory or to come back."""
        self._moved_bytes += nbytes
        if self._moved_bytes >= self._look_after_bytes:
            self._moved_bytes = 0
            self._look_after_bytes = look_after_bytes(self.free_bytes(), self.reserve_bytes)

    def free_bytes(self) -> int:
        """Read free memory; below the reserve, ask the allocator to return memory first."""
        free = free_memory.free_bytes()
        if free < self.reserve_bytes:
            release()
            free = free_memory.free_bytes()
        return free
