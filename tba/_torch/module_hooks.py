"""Module hooks: follow a model's forward; copies of the model do not inherit them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.compiler import is_exporting

from io_backends import interrupts

from . import private
from .private import not_compiled, untraced


class ModelHook:
    """A module hook that becomes one that does nothing when the module is copied or pickled.

    The pickle holds `sys.audit`, which takes any arguments and returns None, so loading it does not need tba.

    Args:
        action: called as the hook.
        copied: called before a copy or pickle. A module's hooks are copied before the modules inside it.
    """

    def __init__(self, action: Callable[..., None], copied: Callable[[], None] | None = None) -> None:
        self._action = action
        self._copied = copied

    @not_compiled
    def __call__(self, *args: Any) -> None:
        """Act, unless the model is being exported: the trace must contain nothing of the hooks."""
        if not is_exporting():
            self._act(*args)

    @untraced  # else the graph of an attached model would break here
    def _act(self, *args: Any) -> None:
        self._action(*args)
        if interrupts.pending:
            _ = [*interrupts.again]

    @property
    def __name__(self) -> str:
        """Raise AttributeError for TorchScript, which compiles a module's hooks, if `_without_hooks` is not called."""
        raise AttributeError(
            "tba has a hook on this module, which torch.jit.script cannot compile: call close() on what `attach` "
            "returned (or leave the `with` of an `offload_context`), and script the model then"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        if self._copied is not None:
            self._copied()
        return not_attached

    def __reduce__(self) -> tuple[Any, ...]:
        if self._copied is not None:
            self._copied()
        return functools.partial, (sys.audit, "tba.not_attached")


@contextmanager
def _none_on(model: nn.Module) -> Iterator[None]:
    """Take our hooks off a model for a region; put them back in the same order among others."""
    found = [hooks for module in model.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    kept = [
        (hooks, list(hooks.items())) for hooks in found if any(isinstance(hook, ModelHook) for hook in hooks.values())
    ]
    try:
        for hooks, items in kept:
            for number, hook in items:
                if isinstance(hook, ModelHook):
                    del hooks[number]
        yield
    finally:
        for hooks, items in kept:
            hooks.clear()
            hooks.update(items)


def _without_hooks(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    assert private.create_script_module is not None
    with _none_on(model):
        return private.create_script_module(model, *args, **kwargs)


private.script_by(_without_hooks)  # its results have none of our hooks


def not_attached(*_: Any) -> None:
    """Do nothing: replaces our hook in a copy of the model within this process."""


def tie(
    model: nn.Module,
    enter: Callable[[tuple[Any, ...], dict[str, Any]], None],
    leave: Callable[[], None],
    copied: Callable[[], None],
) -> Callable[[], None]:
    """Call `enter(args, kwargs)` before the model's forward and `leave` after it, also when it raises an `Exception`.

    `copied()` is called before a copy or pickle of the model: if a KeyboardInterrupt ended its forward, nobody called
    `leave`. Returns a function that removes the hooks.
    """
    ModelHook(lambda: None)()  # the first call imports a part of torch, during which no handler may run
    before = ModelHook(lambda _, args, kwargs: enter(args, kwargs), copied)
    first = model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    last = model.register_forward_hook(ModelHook(lambda *_: leave()), always_call=True)

    def untie() -> None:
        first.remove()
        last.remove()

    return untie
