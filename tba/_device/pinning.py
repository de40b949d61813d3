"""Pinning: host memory that a device copies to and from at full speed, beside its own computation.

CUDA and ROCm pin memory that we have mapped ourselves, of exact sizes and on the device's node. Elsewhere PyTorch has
no such call, and segments are what its own pinned allocator gives.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import torch

from io_backends import HostArena, device_node, pci_address

# Every device may copy from and to it, not only the one that is current where it is pinned.
_PORTABLE = 1


def make_arena(device: torch.device, budget_bytes: int, alignment: int) -> HostArena:
    """Make an arena of pinned memory for a device."""
    if device.type == "cuda":
        node = _node_of(device)
        return HostArena(budget_bytes, alignment=alignment, register=_pin, unregister=_unpin, node=node)
    return HostArena(budget_bytes, alignment=alignment, allocate=_pinned_by_torch)


def _pinned_by_torch(nbytes: int) -> memoryview:
    """Return `nbytes` from a page boundary on. Raises RuntimeError where PyTorch pins nothing."""
    pinned: Any = torch.empty(nbytes + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=True).numpy()
    memory = memoryview(pinned)
    begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % mmap.PAGESIZE
    return memory[begin : begin + nbytes]


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
