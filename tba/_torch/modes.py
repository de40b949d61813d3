"""Modes: hides the engine's own tensor operations from the modes a user has switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.utils._python_dispatch import _disable_current_modes

from . import private

_NO_MODES: AbstractContextManager[None] = nullcontext()


def quiet() -> AbstractContextManager[None]:
    """Hide the operations of a region from modes (FLOP counter, selective checkpointing, default device).

    The engine's operations are not subject to autocast, and draw no random numbers.
    """
    return _hidden() if private.dispatch_mode_count() or private.function_mode_count() else _NO_MODES


@contextmanager
def _hidden() -> Iterator[None]:
    with private.DisableTorchFunction(), _disable_current_modes():
        yield
