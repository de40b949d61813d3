"""Figures: what an Offloader has done so far, under the names that loggers show."""

from __future__ import annotations

import logging
import os
import resource

import torch

from .. import Offloader

_SHOWN = ("offloaded_bytes", "written_bytes", "read_bytes", "kept_bytes", "wait_s", "backpressure_s")


def figures(offload: Offloader) -> dict[str, float]:
    """Bytes and waits since training began, and the peak of memory since the process did."""
    stats = offload.stats()
    shown = {f"tba/{name}": float(getattr(stats, name)) for name in _SHOWN}
    return shown | {"tba/peak_memory_bytes": float(_peak_bytes())}


def end(offload: Offloader) -> None:
    """Close an Offloader whose training has ended, and log its verdict."""
    if not offload.closed:
        if os.environ.get("RANK", "0") == "0":
            logging.getLogger("tba").info(offload.stats().verdict)
        offload.close()


def _peak_bytes() -> int:
    """The most memory held at once: on the device if there is one, else resident in this process."""
    on_device = getattr(torch.get_device_module(), "max_memory_allocated", None)
    if on_device is not None and torch.accelerator.is_available():
        return int(on_device())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB
