"""Allocator: what the C library's, or a preloaded one, does with pages that are free, and how to have them back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_JEMALLOC_ALL_ARENAS = 4096  # MALLCTL_ARENAS_ALL


def _find_release() -> Callable[[], object]:
    """Find the allocator's function that returns memory to the kernel; a preloaded allocator's symbols come first."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallctl"):
        name = f"arena.{_JEMALLOC_ALL_ARENAS}.purge".encode()
        return lambda: library.mallctl(name, None, None, None, ctypes.c_size_t(0))
    if hasattr(library, "mi_collect"):
        return lambda: library.mi_collect(ctypes.c_bool(True))
    return lambda: library.malloc_trim(ctypes.c_size_t(0)) if hasattr(library, "malloc_trim") else None


# Asks the allocator to return what memory it can.
release = _find_release()


def keeps_pages() -> bool:
    """Whether the allocator keeps all free pages, of large blocks too: jemalloc does, as `tba run` sets it."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallctl"):
        return False
    decay_ms = ctypes.c_ssize_t(0)
    size = ctypes.c_size_t(ctypes.sizeof(decay_ms))
    found = ctypes.byref(decay_ms), ctypes.byref(size)
    failed = library.mallctl(b"opt.dirty_decay_ms", *found, None, ctypes.c_size_t(0))
    return not failed and decay_ms.value < 0
