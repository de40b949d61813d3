"""Pinning: host memory that a device copies to and from at full speed, while it computes.

CUDA and ROCm pin memory that we have mapped, in exact sizes and on the device's node. Elsewhere PyTorch has no such
call, and segments come from its own pinned allocator.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from io_backends import BufferPool, HostArena, device_node, pci_address

_PORTABLE = 1  # for every device, not only the one that is current when it is pinned


def make_arena(
    device: torch.device, budget_bytes: int, alignment: int, node: int | None = None, beside: Iterable[BufferPool] = ()
) -> HostArena:
    """Make an arena for the devices of a kind next to a memory node (`node_of`)."""
    if device.type == "cuda":
        return HostArena(budget_bytes, alignment=alignment, register=_pin, unregister=_unpin, node=node, beside=beside)
    return HostArena(budget_bytes, alignment=alignment, allocate=_pinned_by_torch, beside=beside)


def _pinned_by_torch(nbytes: int) -> memoryview:
    """Return page-aligned memory. Raises RuntimeError if PyTorch pins nothing."""
    pinned: Any = torch.empty(nbytes + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=True).numpy()
    memory = memoryview(pinned)
    begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % mmap.PAGESIZE
    return memory[begin : begin + nbytes]


def _pin(address: int, nbytes: int) -> None:
    _check(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))


def _unpin(address: int) -> None:
    _check(torch.cuda.cudart().cudaHostUnregister(address))


def _check(status: Any) -> None:
    try:
        torch.cuda.check_error(status)
    except RuntimeError:
        # CUDA keeps the error until this thread asks for it, which torch does after the next kernel launch and then
        # reports that kernel as failed. So launch one here that takes the blame.
        with suppress(RuntimeError):
            torch.cuda._sleep(0)
        raise


def node_of(device: torch.device) -> int | None:
    """The memory node that memory for a device is placed on; None for any."""
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)
    try:
        return device_node(pci_address(found.pci_domain_id, found.pci_bus_id, found.pci_device_id))
    except AttributeError:  # a build of torch without these properties
        return None
