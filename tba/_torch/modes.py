"""Modes: hides the engine's own tensor operations from modes that the user has switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from . import private

_NO_MODES: AbstractContextManager[None] = nullcontext()


def quiet() -> AbstractContextManager[None]:
    """Hide the operations of a region from modes (FLOP counter, selective checkpointing, default device).

    The engine's operations are not subject to autocast and draw no random numbers.
    """
    return _hidden() if private.dispatch_mode_count() or private.function_mode_count() else _NO_MODES


@contextmanager
def _hidden() -> Iterator[None]:
    with private.DisableTorchFunction(), private.without_dispatch_modes():
        yield


def programs() -> bool:
    """Whether a mode of the program's is on, which sees operations and may count or change them.

    A default device does not count, nor do the engine's own modes.
    """
    return bool(private.dispatch_mode_count()) or any(map(_is_programs, private.function_modes()))


@contextmanager
def without_programs() -> Iterator[None]:
    """Take the program's modes off for a region; a default device stays."""
    modes = private.take_function_modes()
    try:
        for mode in modes:
            if not _is_programs(mode):
                private.push_function_mode(mode)
        with private.without_dispatch_modes():
            yield
    finally:
        private.take_function_modes()
        for mode in modes:
            private.push_function_mode(mode)


def _is_programs(mode: object) -> bool:
    return not isinstance(mode, private.DeviceContext) and not type(mode).__module__.startswith("tba.")
