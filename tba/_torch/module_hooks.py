"""Module hooks: follow a model's forward, and are not inherited by copies of the model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from .private import untraced


class ModelHook:
    """A module hook that becomes one that does nothing when the module is copied or pickled.

    The pickle holds `sys.audit`, which takes any arguments and returns None, so loading it does not need tba.
    """

    def __init__(self, action: Callable[..., None]) -> None:
        self._action = action

    @untraced  # else attached models could not be compiled whole: their graph would break here
    def __call__(self, *args: Any) -> None:
        self._action(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return not_attached

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (sys.audit, "tba.not_attached")


def not_attached(*_: Any) -> None:
    """Do nothing: takes the place of our hook in a copy of the model within this process."""


def before_forward(model: nn.Module, action: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Callable[[], None]:
    """Call `action(args, kwargs)` before the model's forward. Returns a function that removes the hook."""
    hook = ModelHook(lambda _, args, kwargs: action(args, kwargs))
    return model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove


def tie(
    model: nn.Module, enter: Callable[[tuple[Any, ...], dict[str, Any]], None], leave: Callable[[], None]
) -> Callable[[], None]:
    """Call `enter(args, kwargs)` before the model's forward and `leave` after it, also when it raises.

    Returns a function that removes both hooks.
    """
    remove_first = before_forward(model, enter)
    last = model.register_forward_hook(ModelHook(lambda *_: leave()), always_call=True)

    def untie() -> None:
        remove_first()
        last.remove()

    return untie
