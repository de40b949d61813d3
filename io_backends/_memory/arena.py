"""HostArena: pinned host memory, which a device copies to and from at full speed, in exact sizes and within a budget.

A framework's pinned allocator rounds sizes up to powers of two (up to twice the memory), never frees, and pins each
block separately, at milliseconds each. Here whole segments are mapped and pinned, leases are cut from them in blocks,
and segments unused for some time go back to the system.

Guarantees, beyond those of `BufferPool`:

1. A segment is pinned before its first lease and until its last lease has ended; then it is unpinned, then unmapped,
   also after `close` and in a finalizer.
2. A segment that cannot be pinned is used unpinned. The first time there is a warning. Every later segment is tried
   anew, because a limit may be temporary.
3. A forked child neither unpins nor touches the device, and finds zeros in the segments: their pages stay the parent's.
   Else every fork copies what is pinned, or on Linux before 5.9 parts it from what the device writes to.

This module knows no device: the functions that pin and unpin are arguments.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from . import numa
from .pool import SEGMENT_BYTES, BufferPool, Mapping, address_of

_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, from Linux 4.14 on. Not DONTFORK: a child would later unmap what others put there


class HostArena(BufferPool):
    """Leases of pinned memory. Thread-safe.

    Args:
        budget_bytes: most that may be mapped and pinned, rounded down to whole pages.
        alignment: bytes; a page or a multiple of it for leases that files are read into.
        segment_bytes: how much to map and pin at once, unless a lease needs more.
        register: pins `nbytes` at `address` (CUDA: cudaHostRegister); raises if it cannot.
        unregister: undoes it for what began at `address`.
        node: memory node for the pages (see `device_node`), or None for the program's.
        allocate: returns page-aligned pinned memory instead of all that; it is freed with its last view.
        beside: arenas that share the budget, this one among them; not two of them lease at once.
    """

    _gives_back = False  # pinned pages are in memory from the start
    _kept_trims = 32  # pinning 64 MiB took 39 ms on an H100's host, and steps of a training need different amounts

    def __init__(
        self,
        budget_bytes: int,
        *,
        alignment: int = mmap.PAGESIZE,
        segment_bytes: int = SEGMENT_BYTES,
        register: Callable[[int, int], None] | None = None,
        unregister: Callable[[int], None] | None = None,
        node: int | None = None,
        allocate: Callable[[int], memoryview] | None = None,
        beside: Iterable[BufferPool] = (),
    ) -> None:
        super().__init__(alignment, segment_bytes, budget_bytes=budget_bytes, beside=beside)
        self._register = register
        self._unregister = unregister
        self._node = node
        self._allocate = allocate
        self._warned = False

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the segments that are pinned."""
        return sum(segment.memory.nbytes for segment in self._segments if segment.is_pinned)

    def _map(self, nbytes: int) -> tuple[Mapping | None, memoryview]:
        if self._allocate is not None:
            try:
                return None, self._allocate(nbytes)
            except Exception as error:
                self._warn(nbytes, error)
                return super()._map(nbytes)
        mapping, memory = super()._map(nbytes)
        if mapping is None or self._register is None or self._unregister is None:
            return mapping, memory
        address = address_of(memory)
        if self._node is not None:
            numa.bind(address, nbytes, self._node)
        with suppress(OSError):  # an older kernel
            mapping.madvise(_WIPE_ON_FORK)
        try:
            self._register(address, nbytes)
            mapping.before_unmap = partial(_unpin, self._unregister, address, os.getpid())
        except Exception as error:
            self._warn(nbytes, error)
        return mapping, memory

    def _warn(self, nbytes: int, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"pinning {nbytes} bytes of host memory failed ({error}), with {self.pinned_bytes} bytes pinned so "
                "far; copies to and from the device go through pageable memory there, slower. Raise the locked-memory "
                "limit (ulimit -l), or on WSL2 its memory, or lower the budget for host memory.",
                RuntimeWarning,
                stacklevel=2,
            )


def _unpin(unregister: Callable[[int], None], address: int, pid: int) -> None:
    if pid == os.getpid():
        with suppress(Exception):  # the device's context, and with it its pinned memory, may be gone
            unregister(address)
