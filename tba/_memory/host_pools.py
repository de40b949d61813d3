"""Host memory: the buffers transfers go through, pageable for the host's own tensors, pinned for those of a device.

One pool for each, made when first needed, used again from step to step and given back by `close`. Pinned memory is cut
from segments of exact sizes, registered with CUDA and taken from the device's memory node where that is known.
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
    """The pools of one engine. Thread-safe as far as the pools are; making one wants the engine's lock.

    Args:
        budget_bytes: what pinned memory may take.
        idle_bytes: what pageable memory may keep for transfers to come; None for no limit.
    """

    def __init__(self, budget_bytes: int, idle_bytes: int | None = None) -> None:
        self._idle_bytes = idle_bytes
        self._budget_bytes = max(budget_bytes, mmap.PAGESIZE)
        self._pools: dict[str, BufferPool] = {}  # by type of device

    def of(self, device: torch.device, alignment: int = 1) -> BufferPool:
        """The pool for tensors of a device. Leases never share a page, nor a block of `alignment` bytes."""
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
        """Once a step: give back what the last one did not use."""
        for pool in self._pools.values():
            pool.trim()

    def close(self) -> None:
        """Give everything back, what is still in use when it ends."""
        for pool in self._pools.values():
            pool.close()


def _pin(address: int, nbytes: int) -> None:
    """Raises RuntimeError where CUDA cannot."""
    _check(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))


def _unpin(address: int) -> None:
    _check(torch.cuda.cudart().cudaHostUnregister(address))


def _check(status: Any) -> None:
    try:
        torch.cuda.check_error(status)
    except RuntimeError:
        # CUDA keeps the error until this thread asks for it, which torch does when it has launched a kernel: that one
        # would be said to have failed. So launch one that takes the blame.
        with suppress(RuntimeError):
            torch.cuda._sleep(0)
        raise


def _node_of(device: torch.device) -> int | None:
    found: Any = torch.cuda.get_device_properties(device)
    try:
        return device_node(pci_address(found.pci_domain_id, found.pci_bus_id, found.pci_device_id))
    except AttributeError:  # a torch that does not tell
        return None
