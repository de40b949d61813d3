"""Pressure: when memory runs short, the C library is asked to give back what it hoards.

What the engine frees goes to the allocator, which keeps it for the next tensor. As Python comes (glibc), freed blocks
may lie between live ones in the heap, of no use to anybody else, until the process is killed for them. So every few
megabytes moved, free memory is looked at, the less often the more there is; below the reserve the allocator returns
what it can. That costs page faults later, which is why it is done only then; `tba run` starts a program under an
allocator that needs it less.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from . import free_memory

# How much may move between two looks, at least: in the middle of a step a look costs 0.2 ms, so one for each of these
# takes 0.3 % of it.
LOOK_EVERY_BYTES = 32 << 20
# What is free beyond the reserve may shrink this many times faster than tensors are moved before it goes unnoticed.
_TIMES_FASTER = 16
_JEMALLOC_ALL_ARENAS = 4096  # MALLCTL_ARENAS_ALL


def look_after_bytes(free_bytes: int, reserve_bytes: int) -> int:
    """How much may move until the next look, where so much is free."""
    return max(LOOK_EVERY_BYTES, (free_bytes - reserve_bytes) // _TIMES_FASTER)


class Pressure:
    """Counts bytes moved and looks at free memory once in a while. The engine's lock guards it."""

    def __init__(self, reserve_bytes: int) -> None:
        self.reserve_bytes = reserve_bytes
        self._moved_bytes = 0
        self._look_after_bytes = LOOK_EVERY_BYTES

    def moved(self, nbytes: int) -> None:
        """Some bytes are about to leave memory or to come back."""
        self._moved_bytes += nbytes
        if self._moved_bytes >= self._look_after_bytes:
            self._moved_bytes = 0
            self._look_after_bytes = look_after_bytes(self.free_bytes(), self.reserve_bytes)

    def free_bytes(self) -> int:
        """What is free, after the allocator has given back what it hoards where that is less than the reserve."""
        free = free_memory.free_bytes()
        if free < self.reserve_bytes:
            _release()
            free = free_memory.free_bytes()
        return free


def _find_release() -> Callable[[], object]:
    """The loaded allocator's own way; the preloaded one's symbols come first."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallctl"):
        name = f"arena.{_JEMALLOC_ALL_ARENAS}.purge".encode()
        return lambda: library.mallctl(name, None, None, None, ctypes.c_size_t(0))
    if hasattr(library, "mi_collect"):
        return lambda: library.mi_collect(ctypes.c_bool(True))
    return lambda: library.malloc_trim(ctypes.c_size_t(0)) if hasattr(library, "malloc_trim") else None


_release = _find_release()
