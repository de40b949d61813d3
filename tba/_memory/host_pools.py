"""Host pools: buffers that transfers go through, pageable for tensors on the host, pinned for those on a device.

One pool for each, made when first needed, reused from step to step and freed by `close`. Pinned memory is cut from
segments of exact sizes, registered with CUDA and taken from the device's NUMA node where that is known.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import torch

from io_backends import BufferPool, HostArena, device_node, pci_address

# Every device may copy from and to it, not only the one that is current where it is pinned.
_PORTABLE = 1


class HostMemory:
    """Pools of one engine. The pools are thread-safe; call `of`, which makes them, with the engine's lock.

    Args:
        budget_bytes: cap of pinned memory.
        idle_bytes: cap of pageable memory kept for later transfers; None for no limit.
    """

    def __init__(self, budget_bytes: int, idle_bytes: int | None = None) -> None:
        self._idle_bytes = idle_bytes
        self._budget_bytes = max(budget_bytes, mmap.PAGESIZE)
        self._pools: dict[str, BufferPool] = {}  # by type of device

    def of(self, device: torch.device, alignment: int = 1) -> BufferPool:
        """Return the pool for tensors of a device. Leases share neither a page nor a block of `alignment` bytes."""
        pool = self._pools.get(device.type)
        if pool is None:
            alignment = max(alignment, mmap.PAGESIZE)
            if device.type == "cpu":
                pool = BufferPool(alignment, idle_bytes=self._idle_bytes)
            else:
                pool = HostArena(
                    self._budget_bytes, alignment=alignment, register=_pin, unregister=_unpin, node=_node_of(device)
                )
            self._pools[device.type] = pool
        return pool

    def trim(self) -> None:
        """Free buffers that the last steps did not use. Called once a step."""
        for pool in self._pools.values():
            pool.trim()

    def give_back(self) -> None:
        """Free all buffers that nobody uses now: memory is lacking."""
        for pool in self._pools.values():
            pool.trim(all_idle=True)

    def close(self) -> None:
        """Free all buffers; those in use are freed when their lease ends."""
        for pool in self._pools.values():
            pool.close()


def _pin(address: int, nbytes: int) -> None:
    """Register memory with CUDA. Raises RuntimeError where that fails."""
    _check(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))


def _unpin(address: int) -> None:
    _check(torch.cuda.cudart().cudaHostUnregister(address))


def _check(status: Any) -> None:
    try:
        torch.cuda.check_error(status)
    except RuntimeError:
        # CUDA keeps the error until this thread asks for it, which torch does after the next kernel launch: that kernel
        # would be reported as failed. So launch one here that takes the blame.
        with suppress(RuntimeError):
            torch.cuda._sleep(0)
        raise


def _node_of(device: torch.device) -> int | None:
    found: Any = torch.cuda.get_device_properties(device)
    try:
        return device_node(pci_address(found.pci_domain_id, found.pci_bus_id, found.pci_device_id))
    except AttributeError:  # a build of torch without these properties
        return None
