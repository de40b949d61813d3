"""HostArena: host memory that a device copies to and from at full speed, of exact sizes and within a budget.

A framework's own pinned allocator rounds sizes up to powers of two, which costs up to twice the memory, keeps what it
has for good, and pins each block for itself, at milliseconds a time. Here whole segments are mapped and pinned, leases
are cut from them to the block, and what no step has used for some time goes back to the system.

Guarantees, beyond those of `BufferPool`:

1. A segment is pinned before the first lease in it and stays so until the last one has ended; then it is unpinned and
   unmapped, in this order, also after `close` and in a finaliser.
2. A segment that cannot be pinned is used as it is. The first time there is one warning; every later segment is tried
   anew, as a limit may have been a matter of the moment.
3. A forked child neither unpins nor touches the device.

This module knows no device: the two functions that pin and unpin are arguments.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from . import numa
from .pool import SEGMENT_BYTES, BufferPool, Held, Mapping, address_of


class HostArena(BufferPool):
    """Leases of pinned memory. Thread-safe.

    Args:
        budget_bytes: what may be mapped and pinned together, rounded down to whole pages.
        alignment: bytes; a page or a multiple of it where leases are read into from a file.
        segment_bytes: how much is mapped and pinned at once, where a lease does not need more.
        register: pins `nbytes` at `address` (CUDA: cudaHostRegister); raises where it cannot.
        unregister: undoes it for what began at `address`.
        node: the memory node to take pages from (see `device_node`), or None for where the program runs.
        allocate: gives pinned memory from a page boundary on, in place of all that; it goes with the last view of it.
    """

    _gives_back = False  # pinned pages are in memory from the start
    _kept_trims = 32  # pinning 64 MiB took 39 ms on an H100's host, and steps of one training differ in what they need

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
    ) -> None:
        super().__init__(alignment, segment_bytes, budget_bytes=budget_bytes)
        self._register = register
        self._unregister = unregister
        self._node = node
        self._allocate = allocate
        self._warned = False

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the segments that are pinned."""
        return sum(segment.memory.nbytes for segment in self._segments if segment.mapping.before_unmap is not None)

    def _map(self, nbytes: int) -> tuple[Mapping | Held, memoryview]:
        if self._allocate is not None:
            try:
                return Held(), self._allocate(nbytes)
            except Exception as error:
                self._warn(nbytes, error)
                return super()._map(nbytes)
        mapping, memory = super()._map(nbytes)
        if self._register is None or self._unregister is None:
            return mapping, memory
        address = address_of(memory)
        if self._node is not None:
            numa.bind(address, nbytes, self._node)
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
        with suppress(Exception):  # the device may have ended before this, and its pinned memory with it
            unregister(address)
