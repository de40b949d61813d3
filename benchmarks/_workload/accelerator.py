"""Accelerator: PyTorch's module of the device that is trained on, loaded first if it is the one made of a CPU."""

from __future__ import annotations

from typing import Any

import torch

SIMULATED = "sim"  # PyTorch's name of the accelerator made of a CPU


def module_of(kind: str) -> Any:
    """Return PyTorch's module of a kind of device. Raises RuntimeError if PyTorch has none."""
    if kind == SIMULATED and not hasattr(torch, SIMULATED):
        from tests.support import accelerator

        if why := accelerator.why_not():
            raise RuntimeError(why)
        accelerator.load()
    return torch.get_device_module(kind)


def open_device(kind: str, link_bytes_per_s: float | None = None) -> torch.device:
    """Return the device of a kind on which this process computes.

    `link_bytes_per_s`: bandwidth between a simulated device and the host, each way; None for no limit.
    """
    if kind != "cpu":
        module_of(kind)
    if kind == SIMULATED:
        from tests.support import accelerator

        rate = link_bytes_per_s or 0.0
        # To poison freed memory costs time that no device takes; tests do.
        accelerator.configure(in_bytes_per_s=rate, out_bytes_per_s=rate, poison=False)
    return torch.device(kind)


def in_use() -> Any:
    """Return the module of this process's accelerator; None without one, or before its first use."""
    found = torch.accelerator.current_accelerator()
    module = None if found is None else module_of(found.type)
    return module if module is not None and module.is_initialized() else None
