"""Quiet: the engine's own tensor operations, hidden from the modes a user has switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch.utils._python_dispatch import _disable_current_modes

from . import _torch


def modes_are_on() -> bool:
    """Whether a dispatch or function mode (FLOP counter, selective checkpointing, default device) listens here."""
    return bool(_torch.dispatch_mode_count() or _torch.function_mode_count())


@contextmanager
def quiet() -> Iterator[None]:
    """No mode sees or changes what is done inside. Autocast and the default generator are not touched by our operations."""
    with ExitStack() as stack:
        if not modes_are_on():
            yield
            return
        stack.enter_context(_torch.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        yield
