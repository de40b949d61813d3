"""Module hooks: follow a model's forward, and are not inherited by copies of the model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from io_backends import interrupts

from .private import untraced


class ModelHook:
    """A module hook that becomes one that does nothing when the module is copied or pickled.

    The pickle holds `sys.audit`, which takes any arguments and returns None, so loading it does not need tba.

    Args:
        action: is called as the hook.
        copied: is called ahead of a copy or pickle. A module's hooks are copied before the modules inside of it.
    """

    def __init__(self, action: Callable[..., None], copied: Callable[[], None] | None = None) -> None:
        self._action = action
        self._copied = copied

    @untraced  # else attached models could not be compiled whole: their graph would break here
    def __call__(self, *args: Any) -> None:
        self._action(*args)
        if interrupts.pending:
            _ = [*interrupts.again]

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        if self._copied is not None:
            self._copied()
        return not_attached

    def __reduce__(self) -> tuple[Any, ...]:
        if self._copied is not None:
            self._copied()
        return functools.partial, (sys.audit, "tba.not_attached")


def not_attached(*_: Any) -> None:
    """Do nothing: takes the place of our hook in a copy of the model within this process."""


def tie(
    model: nn.Module,
    enter: Callable[[tuple[Any, ...], dict[str, Any]], None],
    leave: Callable[[], None],
    copied: Callable[[], None],
) -> Callable[[], None]:
    """Call `enter(args, kwargs)` before the model's forward and `leave` after it, also when it raises an `Exception`.

    `copied()` is called ahead of a copy or pickle of the model: a KeyboardInterrupt may have ended its forward, after
    which nobody calls `leave`. Returns a function that removes the hooks.
    """
    ModelHook(lambda: None)()  # the first that is called imports a part of torch, in whose midst no handler is to run
    before = ModelHook(lambda _, args, kwargs: enter(args, kwargs), copied)
    first = model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    last = model.register_forward_hook(ModelHook(lambda *_: leave()), always_call=True)

    def untie() -> None:
        first.remove()
        last.remove()

    return untie
