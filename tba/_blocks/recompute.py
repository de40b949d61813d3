"""Recompute: runs a block's forward so that it saves its input only and runs again in backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from io_backends import interrupts

from .._errors import OffloadError
from .._state.found import Found
from .._torch import modes
from .._torch.hook_stack import steps_aside
from .communication import Communication


@interrupts.lets_through
def recompute(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a block's forward under non-reentrant checkpointing.

    The second run finds what the first found, whatever has become of it since, and leaves no trace. A call of which
    that cannot be said beforehand, as it finds what nobody can read or a mode of the program's is on, runs once.

    Raises:
        OffloadError: by `backward`: the block communicates with other ranks, or edits large tensors or its weights in
            place, which it did not when it was tried; or its weights were edited since.
    """
    if modes.programs() or (found := Found.of(module, forward, args, kwargs)).unseen:
        return forward(*args, **kwargs)
    # Bound, as checkpoint has keyword arguments of its own, which a block may have too.
    return checkpoint(_twice(module, partial(forward, **kwargs), found), *args, use_reentrant=False)


def _twice(module: nn.Module, function: Callable[..., Any], found: Found) -> Callable[..., Any]:
    """Make the function that checkpoint runs, once at once and then in backward, there maybe on another thread."""
    exchanged: list[list[int]] = []

    @interrupts.lets_through
    def first(*inputs: Any) -> Any:
        steps_aside()  # checkpoint's pair of this run: without a plan there would be none to refuse
        communication = Communication()
        try:
            with communication:
                return function(*inputs)
        finally:
            exchanged.append(_exchanged(communication))

    @interrupts.lets_through
    def second(*inputs: Any) -> Any:
        steps_aside()
        if lost := found.lost():
            raise OffloadError(
                f"{type(module).__name__} recomputes, and {lost} was edited in place since its forward began, which "
                "was not so in the step when it was tried: gradients would be wrong. Name other blocks (blocks=), or "
                "edit it after backward"
            )
        communication = Communication()
        try:
            with found.as_found(), modes.without_programs(), communication:
                return function(*inputs)
        finally:  # checkpoint leaves the second run by an exception
            # It ends with the last tensor that is saved.
            again = _exchanged(communication)
            if any(0 < now <= once for once, now in zip(exchanged[0], again, strict=False)):
                raise OffloadError(
                    f"{type(module).__name__} recomputes on this rank and communicates with others, which it did not "
                    "in the step when it was tried: gradients would be wrong from here on. Name other blocks (blocks=)"
                    ", or have this one communicate in each step, so that it never recomputes"
                )

    @interrupts.lets_through
    def runs(*inputs: Any) -> Any:
        return second(*inputs) if exchanged else first(*inputs)

    return runs


def _exchanged(communication: Communication) -> list[int]:
    return [communication.sent, *communication.counts]
