"""Hook stack: the pairs of saved-tensor hooks that tba has pushed on this thread.

PyTorch keeps a stack of pairs for each thread and calls the innermost pair only.

A pair that a model's forward has pushed is popped when the forward ends, except by KeyboardInterrupt: torch does not
call a module's closing hooks then. So before anything is pushed, pairs are popped whose forward is no longer on the
Python stack.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from io_backends import interrupts

from . import private
from .user_frames import warn

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class Pair:
    """A pair of hooks of tba's on this thread's stack.

    Args:
        forward: the model whose forward pushes it, held weakly; None for a `with` statement.
        on_dead: called when the forward turns out to have ended without popping the pair.
        owner: what enters it, for others to ask about.

    Attributes:
        pushed: whether the hooks are on the stack.
        armed: whether interrupts are held back for it.
        mode_below: the torch-function mode that was the innermost at the entry.
        unwatch: ends what follows the model's forward while the pair is entered.
    """

    def __init__(
        self,
        pack: Pack,
        unpack: Unpack,
        forward: weakref.ref[nn.Module] | None = None,
        on_dead: Callable[[Pair], None] = lambda pair: None,
        owner: object = None,
    ) -> None:
        self.pack = pack
        self.unpack = unpack
        self.on_dead = on_dead
        self.owner = owner
        self._forward = forward
        # The number of this model's calls on the Python stack when it was made; 0 for a `with` statement.
        self._depth = _depth(forward) if forward is not None else 0
        self.pushed = False
        self._refused = False  # has warned that hooks are disabled
        self._below: object = None  # the innermost pair at the entry
        self.armed = False
        self.mode_below: object = None
        self.unwatch: Callable[[], None] = lambda: None

    def enter(self, *, push: bool) -> None:
        """Become one of this thread's pairs; its hooks stay off for now unless `push`."""
        clear_dead(self._forward)
        self._below = private.top_hooks(True)
        if push:
            self.push()
        _ours.pairs.append(self)

    def push(self) -> None:
        """Make its hooks the innermost. Inside torch's `disable_saved_tensors_hooks` it only warns."""
        tracer, self.pushed = interrupts.tracer(), True  # ahead of it: `pop` finds out what is there
        try:
            private.push_hooks(self.pack, self.unpack)
        except RuntimeError as error:
            interrupts.pass_on(error, tracer)
            self.pushed, self._refused = False, True
            warn(f"saved-tensor hooks are disabled here ({error}); nothing is offloaded until this context is left")

    def push_late(self) -> bool:
        """Push its hooks after all, if the stack is then as if they had been pushed at the entry.

        It does not push above hooks of others that came later, because those would pop ours; nor in a node's backward,
        which has a stack of its own; nor where hooks are lifted.
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
        """Pop its hooks for now, if they are the innermost."""
        if self._is_innermost() and not _ours.lifted and private.current_graph_task_id() == -1:
            private.pop_hooks()
            self.pushed = False

    def pop(self) -> None:
        """Cease to be one of this thread's pairs; its hooks go, even from beneath hooks that others left there.

        May be called again, where the first call was broken off.
        """
        if self in _ours.pairs:
            _ours.pairs.remove(self)
        self.unwatch()
        if not self.pushed:
            return
        above = []
        while (top := private.top_hooks(True)) is not None:
            private.pop_hooks()
            if top == (self.pack, self.unpack):
                break
            above.append(top)
        for pair in reversed(above):
            private.push_hooks(*pair)
        self.pushed = False

    def _is_innermost(self) -> bool:
        return self.pushed and private.top_hooks(True) == (self.pack, self.unpack)

    def was_taken(self) -> bool:
        """Note that hooks of others, which have ended above a dead pair, have popped its hooks instead of their own.

        What they left, if that was the innermost pair at the entry, goes too. False if its hooks are still there, or
        torch lets none be pushed back here, so that nobody can look.
        """
        if not private.hooks_are_enabled() or (self.pack, self.unpack) in _stack():
            return False
        self.pushed = False
        if self._below is not None and private.top_hooks(True) == self._below:
            private.pop_hooks()
        return True

    def is_dead(self, entering: weakref.ref[nn.Module] | None) -> bool:
        """Whether its forward has ended. If its model is `entering`, another forward of it has just begun."""
        if self._forward is None or not self._depth:
            return False
        return self._depth > _depth(self._forward) - (entering is not None and entering() is self._forward())


class _Ours(threading.local):
    """State of a thread: the pairs that were entered, from the outermost."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.lifted = 0  # regions of `lifted` under way


_ours = _Ours()


def clear_dead(entering: weakref.ref[nn.Module] | None = None) -> None:
    """Pop the innermost pairs whose forward has ended in a KeyboardInterrupt."""
    while _ours.pairs and (pair := _ours.pairs[-1]).is_dead(entering):
        if pair.pushed and not pair._is_innermost() and not pair.was_taken():
            return  # another pair is the innermost
        pair.pop()
        pair.on_dead(pair)


def _stack() -> list[tuple[Pack, Unpack]]:
    """List the pairs of hooks on this thread's stack, from the innermost."""
    pairs = []
    while (top := private.top_hooks(True)) is not None:
        private.pop_hooks()
        pairs.append(top)
    for pair in reversed(pairs):
        private.push_hooks(*pair)
    return pairs


def owners() -> list[object]:
    """List the owners of the pairs that were entered on this thread, from the outermost."""
    return [pair.owner for pair in _ours.pairs]


def _depth(model: weakref.ref[nn.Module]) -> int:
    """Count the calls of a model on this thread's Python stack."""
    depth, frame = 0, sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is model():
            depth += 1
        frame = frame.f_back  # type: ignore[assignment]
    return depth


_CALL = nn.Module._call_impl.__code__
# Where it calls closing hooks for a forward that has raised, it takes what they raise for theirs.
interrupts.takes_errors(_CALL)


@contextmanager
def lifted(pack: Pack) -> Iterator[None]:
    """Pop every pair at the top of the stack whose pack is `pack`, for a region.

    Other pairs stay; if one of them is the innermost, ours does not act anyway. `torch.func` transforms, which refuse
    any active hooks, work in the region if ours are the only ones.
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


@contextmanager
def bare(in_hook: bool) -> Iterator[None]:
    """Take all hooks off this thread's stack, ours and those of others, for a region: a signal's handler runs in it.

    It is none of what the hooks are for: a block that runs twice saves the same tensors each time. `in_hook`: it is
    called from within a hook, where autograd records nothing; there it does.
    """
    removed = []
    while private.hooks_are_enabled() and (top := private.top_hooks(True)) is not None:
        private.pop_hooks()
        removed.append(top)
    _ours.lifted += 1
    try:
        with torch.enable_grad() if in_hook else nullcontext():
            yield
    finally:
        _ours.lifted -= 1
        for pair in reversed(removed):
            private.push_hooks(*pair)


def innermost() -> tuple[Pack, Unpack] | None:
    """Return the innermost pair of ours that is pushed on this thread, whatever others stand above it; else None."""
    if _ours.lifted:
        return None
    return next(((pair.pack, pair.unpack) for pair in reversed(_ours.pairs) if pair.pushed), None)


def owner_of_innermost(but: Pack) -> str | None:
    """Name the owner of the innermost pair as `module.Class`; None without a pair, for `but`, and for checkpointing."""
    top = private.top_hooks(True)
    if top is None or top[0] == but:
        return None
    pack: Any = top[0]
    owner = type(pack.__self__) if getattr(pack, "__self__", None) is not None else pack
    module, name = getattr(owner, "__module__", ""), getattr(owner, "__qualname__", type(owner).__qualname__)
    if module.startswith("torch.utils.checkpoint"):
        return None
    return f"{module}.{name.partition('.<locals>')[0].removesuffix('.__init__')}"


# What the errors contain with which torch refuses active hooks.
_REFUSED = "saved tensor hooks"
_HINT = (
    "tba: the hooks that torch refuses here are those of an offload_context or attach; call this inside "
    "`with offload.suspend():`, where nothing is offloaded"
)


def hint(error: BaseException | None) -> None:
    """Add a note on how to lift our hooks to an error with which torch refuses them, as `torch.func.grad` does."""
    refused = isinstance(error, RuntimeError) and _REFUSED in str(error)
    if refused and _HINT not in getattr(error, "__notes__", ()):
        error.add_note(_HINT)  # type: ignore[union-attr]
