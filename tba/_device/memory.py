"""Memory of devices: what tensors may still take there, and how much there is."""

from __future__ import annotations

import torch
from torch import nn

from .kinds import function, has_streams, module_of


def free_bytes(device: torch.device) -> int:
    """Bytes that tensors on a device may still take: free there, or held unused by PyTorch's allocator."""
    module = module_of(device.type)
    driver_free, driver_total = module.mem_get_info(device)
    # Each of torch's functions for one figure flattens and sorts all of them: 140 us on an H100's host, this 25 us.
    statistics = module.memory_stats_as_nested_dict(device)
    reserved, allocated = (
        int(statistics[kind]["all"]["current"]) if statistics else 0 for kind in ("reserved_bytes", "allocated_bytes")
    )
    fraction = function(device.type, "get_per_process_memory_fraction")
    allowed = int(driver_total * (fraction(device) if fraction is not None else 1.0))
    return max(0, min(int(driver_free) + reserved, allowed) - allocated)


def total_bytes(device: torch.device) -> int:
    return int(module_of(device.type).get_device_properties(device).total_memory)


def least_total_bytes(model: nn.Module | None) -> int | None:
    """Memory of the smallest device that a model is on; None for a model on the host, or none."""
    parameters = model.parameters() if model is not None else ()
    devices = {parameter.device for parameter in parameters if has_streams(parameter.device.type)}
    return min(map(total_bytes, devices), default=None)
