"""Hook stack: this thread's stack of saved-tensor hooks, as far as its pairs are ours.

Only the innermost pair of the stack applies, and the stack belongs to one thread.

A pair that a model's forward has pushed is taken off when the forward ends, except by KeyboardInterrupt: a module's
closing hooks do not run then. So before anything is pushed, pairs whose forward is no longer on the Python stack go.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from . import private
from .user_frames import warn

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class Pair:
    """One pair of ours on this thread's stack.

    Args:
        forward: the model whose forward has pushed it, held weakly; None for a `with` statement.
        on_dead: called where that forward has ended without taking the pair off.
    """

    def __init__(
        self,
        pack: Pack,
        unpack: Unpack,
        forward: weakref.ref[nn.Module] | None = None,
        on_dead: Callable[[Pair], None] = lambda pair: None,
    ) -> None:
        self.pack = pack
        self.unpack = unpack
        self.on_dead = on_dead
        self._forward = forward
        # Which of the calls of this model on the stack it belongs to, from the outermost; 0 where there is none.
        self._depth = _depth(forward) if forward is not None else 0
        self.pushed = False
        self._refused = False  # told that hooks are disabled
        self._below: object = None  # what was innermost at the entry
        self.armed = False  # whether interrupts are held back for it
        self.unwatch: Callable[[], None] = _nothing  # ends what looks on while it is on

    def enter(self, *, push: bool) -> None:
        """Begin to be one of this thread's pairs, without its hooks for now unless `push`."""
        clear_dead(self._forward)
        self._below = private.top_hooks(True)
        if push:
            self.push()
        _ours.pairs.append(self)

    def push(self) -> None:
        """Make its hooks innermost. Warns where `disable_saved_tensors_hooks` of torch rules, and does nothing."""
        try:
            private.push_hooks(self.pack, self.unpack)
        except RuntimeError as error:
            self._refused = True
            warn(f"saved-tensor hooks are disabled here ({error}); nothing is offloaded until this context is left")
            return
        self.pushed = True

    def push_late(self) -> bool:
        """Push its hooks after all, if that leaves the stack as if they had been pushed at the entry.

        Not above hooks that others have pushed since, as they take off what is topmost; not in a node's backward, whose
        stack is another one; not where hooks are lifted.
        """
        if not (
            self._refused
            or _ours.lifted
            or private.current_graph_task_id() != -1
            or private.top_hooks(True) != self._below
        ):
            self.push()
        return self.pushed

    def lift(self) -> None:
        """Take its hooks off for now, if they are innermost."""
        if self._is_innermost() and not _ours.lifted and private.current_graph_task_id() == -1:
            private.pop_hooks()
            self.pushed = False

    def pop(self) -> None:
        """Take it off, from beneath what others have pushed and left."""
        _ours.pairs.remove(self)
        self.unwatch()
        if not self.pushed:
            return
        self.pushed = False
        above = []
        while (top := private.top_hooks(True)) is not None:
            private.pop_hooks()
            if top == (self.pack, self.unpack):
                break
            above.append(top)
        for pair in reversed(above):
            private.push_hooks(*pair)

    def _is_innermost(self) -> bool:
        return self.pushed and private.top_hooks(True) == (self.pack, self.unpack)

    def is_dead(self, entering: weakref.ref[nn.Module] | None) -> bool:
        """Whether its forward has ended; another of the same model is just beginning where that is `entering`."""
        if self._forward is None or not self._depth:
            return False
        return self._depth > _depth(self._forward) - (entering is not None and entering() is self._forward())


def _nothing() -> None:
    """What ends where nothing has begun."""


class _Ours(threading.local):
    """Per thread: the pairs of ours on the stack, from the outermost."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.lifted = 0  # regions of `lifted` that run


_ours = _Ours()


def clear_dead(entering: weakref.ref[nn.Module] | None = None) -> None:
    """Take the innermost pairs off whose forward has ended in a KeyboardInterrupt."""
    while _ours.pairs and (pair := _ours.pairs[-1]).is_dead(entering):
        if pair.pushed and not pair._is_innermost():
            return  # somebody else's pair is innermost
        pair.pop()
        pair.on_dead(pair)


def _depth(model: weakref.ref[nn.Module]) -> int:
    """How many calls of a model are on this thread's Python stack."""
    depth, frame = 0, sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is model():
            depth += 1
        frame = frame.f_back  # type: ignore[assignment]
    return depth


_CALL = nn.Module._call_impl.__code__


@contextmanager
def lifted(pack: Pack) -> Iterator[None]:
    """No pair of ours is active inside: lifts every pair at the top of the stack whose pack is `pack`.

    Pairs of others are left alone; where one of them is innermost, ours does not act anyway. `torch.func` transforms,
    which refuse any active hooks, work inside where ours are the only ones.
    """
    removed = []
    while (top := private.top_hooks(True)) is not None and top[0] == pack:
        private.pop_hooks()
        removed.append(top)
    _ours.lifted += 1
    try:
        yield
    finally:
        _ours.lifted -= 1
        for pair in reversed(removed):
            private.push_hooks(*pair)


def owner_of_innermost(but: Pack) -> str | None:
    """Who has pushed the innermost pair, as `module.Class`; None where there is none, it is ours or checkpointing's."""
    top = private.top_hooks(True)
    if top is None or top[0] == but:
        return None
    pack: Any = top[0]
    owner = type(pack.__self__) if getattr(pack, "__self__", None) is not None else pack
    module, name = getattr(owner, "__module__", ""), getattr(owner, "__qualname__", type(owner).__qualname__)
    if module.startswith("torch.utils.checkpoint"):
        return None
    return f"{module}.{name.partition('.<locals>')[0].removesuffix('.__init__')}"


# Of the errors of torch: the mark of those with which it refuses hooks that are active.
_REFUSED = "saved tensor hooks"
_HINT = (
    "tba: the hooks that torch refuses here are those of an offload_context or attach; call this inside "
    "`with offload.suspend():`, where nothing is offloaded"
)


def hint(error: BaseException | None) -> None:
    """Add to an error with which torch refuses active hooks, as `torch.func.grad` does, how to lift ours."""
    refused = isinstance(error, RuntimeError) and _REFUSED in str(error)
    if refused and _HINT not in getattr(error, "__notes__", ()):
        error.add_note(_HINT)  # type: ignore[union-attr]
