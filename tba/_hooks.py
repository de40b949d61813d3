"""Hooks: pushing a pair of saved-tensor hooks on this thread, lifting it for a region, and tying it to a model.

The stack of hooks is thread-local and only its innermost pair applies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from . import _torch
from ._errors import OffloadWarning

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


def push(pack: Pack, unpack: Unpack) -> bool:
    """Make the pair innermost; False, with a warning, where `disable_saved_tensors_hooks` of torch rules."""
    try:
        _torch.push_hooks(pack, unpack)
    except RuntimeError as error:
        warnings.warn(
            f"saved-tensor hooks are disabled here ({error}); nothing is offloaded until this context is left",
            OffloadWarning,
            stacklevel=3,
        )
        return False
    return True


def pop() -> None:
    """Take the innermost pair off."""
    _torch.pop_hooks()


@contextmanager
def lifted(pack: Pack) -> Iterator[None]:
    """No pair of ours is active inside: lifts every pair at the top of the stack whose pack is `pack`.

    Pairs of others are left alone; where one of them is innermost, ours does not act anyway. `torch.func` transforms,
    which refuse any active hooks, work inside where ours are the only ones.
    """
    removed = []
    while (top := _torch.top_hooks(True)) is not None and top[0] == pack:
        _torch.pop_hooks()
        removed.append(top)
    try:
        yield
    finally:
        for pair in reversed(removed):
            _torch.push_hooks(*pair)


class _ModelHook:
    """A module hook that copies of the module do not inherit: copied or pickled it becomes one that does nothing."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    @_torch.untraced  # else attached models could not be compiled whole: their graph would break here
    def __call__(self, *_: Any, **__: Any) -> None:
        self._action()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return not_attached

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _copied, ()


def not_attached(*_: Any, **__: Any) -> None:
    """What stands in a copied model where the original had a hook of an Offloader."""


def _copied() -> Callable[..., None]:
    return not_attached


def tie(model: nn.Module, enter: Callable[[], None], leave: Callable[[], None]) -> Callable[[], None]:
    """Call `enter` before the model's forward and `leave` after it, also when it raises. Returns what unties them."""
    handles = (
        model.register_forward_pre_hook(_ModelHook(enter), prepend=True),
        model.register_forward_hook(_ModelHook(leave), always_call=True),
    )

    def untie() -> None:
        for handle in handles:
            handle.remove()

    return untie
