"""Quiet: the engine's own tensor operations, hidden from the modes a user has switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import _disable_current_modes

from . import private


@contextmanager
def quiet() -> Iterator[None]:
    """No mode (FLOP counter, selective checkpointing, default device) sees or changes what is done inside.

    Autocast and the default generator are not touched by the engine's operations anyway.
    """
    if not (private.dispatch_mode_count() or private.function_mode_count()):
        yield
        return
    with private.DisableTorchFunction(), _disable_current_modes():
        yield
