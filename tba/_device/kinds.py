"""Kinds of device: PyTorch's module for each, and whether it has streams, so that copies can overlap computation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# PyTorch's own.
MODULES = ("torch.accelerator", "torch.cuda", "torch.mps", "torch.mtia", "torch.xpu")


@cache
def module_of(kind: str) -> Any:
    """PyTorch's module for a kind of device; None if there is none."""
    try:
        return torch.get_device_module(kind)
    except RuntimeError:
        return None


@cache
def has_streams(kind: str) -> bool:
    """Whether a kind of device can copy while it computes. A CPU cannot; MPS has only one queue."""
    return kind != "cpu" and all(hasattr(module_of(kind), name) for name in ("Stream", "Event", "current_stream"))


def is_streamed(tensor: Tensor) -> bool:
    return not tensor.is_cpu and has_streams(tensor.device.type)


def available() -> tuple[str, Any] | None:
    """The kind of this machine's accelerator and its module; None without a usable one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else (found.type, module_of(found.type))


def active() -> tuple[str, Any] | None:
    """The kind of this process's accelerator and its module; None without one, or while it is not in use."""
    found = torch.accelerator.current_accelerator()
    module = None if found is None else module_of(found.type)
    if found is None or module is None or not getattr(module, "is_initialized", bool)():
        return None
    return found.type, module


def function(kind: str, name: str) -> Callable[..., Any] | None:
    found: Callable[..., Any] | None = getattr(module_of(kind), name, None)
    return found
