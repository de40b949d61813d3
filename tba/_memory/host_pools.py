"""Host pools: buffers that transfers go through, pageable for tensors on the host, pinned for those on a device.

One pool for each kind of device and memory node, made when first needed, reused from step to step and freed by `close`.
"""

from __future__ import annotations

import mmap

import torch

from io_backends import BufferPool, HeapPool

from .._device.pinning import make_arena, node_of


class HostMemory:
    """Pools of one engine. The pools are thread-safe; call `of`, which makes them, with the engine's lock.

    Args:
        budget_bytes: cap of pinned memory, for all devices of a kind together.
        idle_bytes: cap of pageable memory kept for later transfers; None for no limit.
        in_heap: pageable memory is the allocator's, which keeps free pages anyway.
    """

    def __init__(self, budget_bytes: int, idle_bytes: int | None = None, *, in_heap: bool = False) -> None:
        self._idle_bytes, self._in_heap = idle_bytes, in_heap
        self._budget_bytes = self._first_bytes = max(budget_bytes, mmap.PAGESIZE)
        self._pools: dict[str, dict[int | None, BufferPool]] = {}  # by kind of device, by memory node
        self._of: dict[torch.device, BufferPool] = {}

    def of(self, device: torch.device, alignment: int = 1) -> BufferPool:
        """Return the pool for tensors of a device. Leases share neither a page nor a block of `alignment` bytes."""
        pool = self._of.get(device)
        if pool is None:
            pools, node = self._pools.setdefault(device.type, {}), node_of(device)
            pool = pools.get(node)
            if pool is None:
                alignment = max(alignment, mmap.PAGESIZE)
                if device.type == "cpu" and self._in_heap:
                    pool = HeapPool(alignment)
                elif device.type == "cpu":
                    pool = BufferPool(alignment, idle_bytes=self._idle_bytes)
                else:
                    pool = make_arena(device, self._budget_bytes, alignment, node, pools.values())
                pools[node] = pool
            self._of[device] = pool
        return pool

    def resize(self, share: float) -> None:
        """Cap pinned memory at `share` times the first budget from now on."""
        self._budget_bytes = max(int(share * self._first_bytes), mmap.PAGESIZE)
        for device, pool in self._of.items():
            if device.type != "cpu":
                pool.resize(self._budget_bytes)

    def trim(self) -> None:
        """Free buffers that the last steps did not use. Called once a step."""
        for pool in set(self._of.values()):
            pool.trim()

    def give_back(self) -> None:
        """Free all buffers that nobody uses now: memory is lacking."""
        for pool in set(self._of.values()):
            pool.trim(all_idle=True)

    def close(self) -> None:
        """Free all buffers; those in use are freed when their lease ends."""
        for pool in set(self._of.values()):
            pool.close()
