"""Kinds of device: PyTorch's module for each, and whether it has streams, beside which copies can run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Of PyTorch's own.
MODULES = ("torch.accelerator", "torch.cuda", "torch.mps", "torch.mtia", "torch.xpu")


@cache
def module_of(kind: str) -> Any:
    """Return PyTorch's module for a kind of device; None where there is none."""
    try:
        return torch.get_device_module(kind)
    except RuntimeError:
        return None


@cache
def has_streams(kind: str) -> bool:
    """Whether copies of a kind of device can run beside what it computes. Not on a CPU; MPS has one queue alone."""
    return kind != "cpu" and all(hasattr(module_of(kind), name) for name in ("Stream", "Event", "current_stream"))


def is_streamed(tensor: Tensor) -> bool:
    """Whether a tensor is on a device that has streams."""
    return not tensor.is_cpu and has_streams(tensor.device.type)


def available() -> tuple[str, Any] | None:
    """Return the kind of this machine's accelerator and its module; None without one that can be used."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else (found.type, module_of(found.type))


def active() -> tuple[str, Any] | None:
    """Return the kind of this process's accelerator and its module; None without, or while it is not in use."""
    found = torch.accelerator.current_accelerator()
    module = None if found is None else module_of(found.type)
    if found is None or module is None or not getattr(module, "is_initialized", bool)():
        return None
    return found.type, module


def function(kind: str, name: str) -> Callable[..., Any] | None:
    """Return a function of a kind's module; None where it has none."""
    found: Callable[..., Any] | None = getattr(module_of(kind), name, None)
    return found
