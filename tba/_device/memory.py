"""Memory of devices: what tensors may still take there, and how much there is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from .kinds import function, has_streams, module_of
from .streams import capturing_here


class Figures(NamedTuple):
    """What a device's memory holds.

    Attributes:
        free_bytes: that tensors may still take: free there, or held unused by PyTorch's allocator in whole segments.
            What is left over of a segment serves only what fits into it, so it does not count.
        active_bytes: of tensors, and of what another stream may still be using.
        peak_bytes: the most of those, since the program last asked for a new count.
    """

    free_bytes: int
    active_bytes: int
    peak_bytes: int


def figures(device: torch.device) -> Figures:
    """Ask a device and PyTorch's allocator for it."""
    module = module_of(device.type)
    driver_free, driver_total = module.mem_get_info(device)
    # Each of torch's functions for one figure flattens and sorts all of them: 140 us on an H100's host, this 25 us.
    statistics = module.memory_stats_as_nested_dict(device)

    def of(kind: str, which: str = "current") -> int:
        return int(statistics.get(f"{kind}_bytes", {}).get("all", {}).get(which, 0))

    fraction = function(device.type, "get_per_process_memory_fraction")
    allowed = int(driver_total * (fraction(device) if fraction is not None else 1.0))
    free = min(int(driver_free) + of("reserved"), allowed) - of("allocated") - of("inactive_split")
    return Figures(max(0, free), of("active"), of("active", "peak"))


def give_back(device: torch.device) -> None:
    """Have PyTorch's allocator give back to the device what no tensor holds."""
    if (
        has_streams(device.type)
        and not capturing_here()
        and (empty := function(device.type, "empty_cache")) is not None
    ):
        empty()


def total_bytes(device: torch.device) -> int:
    return int(module_of(device.type).get_device_properties(device).total_memory)


def least_total_bytes(model: nn.Module | None) -> int | None:
    """Memory of the smallest device that a model is on; None for a model on the host, or none."""
    parameters = model.parameters() if model is not None else ()
    devices = {parameter.device for parameter in parameters if has_streams(parameter.device.type)}
    return min(map(total_bytes, devices), default=None)
