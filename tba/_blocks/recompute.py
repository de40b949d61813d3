"""Recompute: runs a block's forward so that it saves its input only and runs again in backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from io_backends import interrupts

from .._errors import OffloadError
from .._torch.hook_stack import steps_aside
from .communication import Communication

# The switch of transformers: a layer's forward that finds it on drops caches from its arguments, which a second run
# would write to again, and has itself called by the function beside it.
_LAYER = "GradientCheckpointingLayer"
_SWITCH, _CALLS = "gradient_checkpointing", "_gradient_checkpointing_func"


@interrupts.lets_through
def recompute(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a block's forward under non-reentrant checkpointing, by transformers' own switch where it has one.

    Raises:
        OffloadError: by `backward`: the block communicates with other ranks, which it did not when it was tried.
    """

    @interrupts.lets_through
    def twice(function: Callable[..., Any], *inputs: Any) -> Any:
        return checkpoint(_alone(module, function), *inputs, use_reentrant=False)

    if has_switch(module):
        return _switched(module, twice, forward, args, kwargs)
    # Bound, as checkpoint has keyword arguments of its own, which a block may have too.
    return twice(partial(forward, **kwargs), *args)


def again(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a block's forward as its second run would be called."""
    if has_switch(module):
        return _switched(module, lambda function, *inputs: function(*inputs), forward, args, kwargs)
    return forward(*args, **kwargs)


def has_switch(module: nn.Module) -> bool:
    """Whether it is a layer of transformers whose forward looks at the switch, and the switch is off.

    In older versions `__call__` does, which a block's forward does not come through.
    """
    kinds = (kind for kind in type(module).__mro__ if kind.__name__ == _LAYER)
    is_layer = any("__init_subclass__" in vars(kind) and "__call__" not in vars(kind) for kind in kinds)
    return is_layer and module.training and getattr(module, _SWITCH, None) is False


def _alone(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function that runs twice raise where both runs communicate in one group; once it may be another thread."""
    exchanged: list[list[int]] = []

    @interrupts.lets_through
    def runs(*inputs: Any) -> Any:
        steps_aside()  # checkpoint's pair of this run: without a plan there would be none to refuse
        communication = Communication()
        try:
            with communication:
                return function(*inputs)
        finally:  # checkpoint leaves the second run by an exception
            exchanged.append([communication.sent, *communication.counts])
            first, last = exchanged[0], exchanged[-1]  # which ends with the last tensor that is saved
            if len(exchanged) > 1 and any(0 < again <= once for once, again in zip(first, last, strict=False)):
                raise OffloadError(
                    f"{type(module).__name__} recomputes on this rank and communicates with others, which it did not "
                    "in the step when it was tried: gradients would be wrong from here on. Name other blocks (blocks=)"
                    ", or have this one communicate in each step, so that it never recomputes"
                )

    return runs


@interrupts.lets_through
def _switched(
    module: nn.Module, calls: Callable[..., Any], forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> Any:
    mine = vars(module)
    before = {name: mine[name] for name in (_SWITCH, _CALLS) if name in mine}
    mine[_SWITCH], mine[_CALLS] = True, calls
    try:
        return forward(*args, **kwargs)
    finally:
        for name in (_SWITCH, _CALLS):
            mine.pop(name, None)
        mine.update(before)
