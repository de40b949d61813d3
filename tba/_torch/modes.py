"""Modes: hides the engine's own tensor operations from the modes a user has switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import _disable_current_modes

from . import private


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the operations of a region from modes (FLOP counter, selective checkpointing, default device).

    The engine's operations are not subject to autocast, and draw no random numbers.
    """
    if not (private.dispatch_mode_count() or private.function_mode_count()):
        yield
        return
    with private.DisableTorchFunction(), _disable_current_modes():
        yield
