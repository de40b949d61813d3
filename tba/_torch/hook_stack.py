"""Hook stack: the pairs of saved-tensor hooks that tba has pushed on this thread.

PyTorch keeps a stack of pairs per thread and calls only the innermost pair.

Guarantees:

1. Another owner's pair is popped when that owner says so, even if ours is above it, and ours stays; torch alone would
   pop whatever is innermost. So contexts may be left in any order.
2. If torch refuses hooks (`torch.func` transforms that compute gradients, `disable_saved_tensors_hooks`), ours step
   aside unless there are others, and come back afterwards. Tensors saved in between stay in memory.

Functions that replace torch's own do both: torch's Python code looks these up by name at each call. If a pair of ours
was popped in another way, leaving it notices that.

A pair pushed by a model's forward is popped when the forward ends, but not by KeyboardInterrupt, for which torch skips
a module's closing hooks. So before anything is pushed, pairs are popped whose forward is no longer on the Python stack.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from io_backends import interrupts

from . import private
from .user_frames import warn

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]
_Hooks = tuple[Pack, Unpack]


class Pair:
    """A pair of tba's hooks on this thread's stack.

    Args:
        forward: the model whose forward pushes it, held weakly; None for a `with` statement.
        on_dead: called if the forward turns out to have ended without popping the pair.
        owner: what enters it, for others to ask about.

    Attributes:
        pushed: the hooks are on the stack.
        armed: interrupts are held back for it.
        mode_below: the innermost torch-function mode at the entry.
        unwatch: stops following the model's forward.
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
        steps_aside(pack)
        self._forward = forward
        # Calls of this model on the Python stack when the pair was made; 0 for a `with` statement.
        self._depth = _depth(forward) if forward is not None else 0
        self.pushed = False
        self._refused = False  # has warned that hooks are disabled
        self._beneath: list[_Hooks] = []  # the pairs on the stack at the entry, from the innermost
        self.armed = False
        self.mode_below: object = None
        self.unwatch: Callable[[], None] = lambda: None

    def enter(self, *, push: bool) -> None:
        """Become one of this thread's pairs; push the hooks if `push`."""
        clear_dead(self._forward)
        self._beneath = _stack()
        if push:
            self.push()
        _ours.pairs.append(self)

    def push(self) -> None:
        """Make its hooks the innermost. Inside torch's `disable_saved_tensors_hooks` it only warns."""
        tracer, self.pushed = interrupts.tracer(), True  # first: `pop` finds out what is there
        try:
            private.push_hooks(self.pack, self.unpack)
        except RuntimeError as error:
            interrupts.pass_on(error, tracer)
            self.pushed, self._refused = False, True
            warn(f"saved-tensor hooks are disabled here ({error}); nothing is offloaded until this context is left")

    def push_late(self) -> bool:
        """Push its hooks after all, if the stack is as it was at the entry.

        Not above hooks of others that came later, as the innermost acts; nor in a node's backward, which has its own
        stack; nor while hooks are lifted.
        """
        if not (
            self._refused
            or _ours.lifted
            or private.current_graph_task_id() != -1
            or private.top_hooks(True) != next(iter(self._beneath), None)
        ):
            self.push()
        return self.pushed

    def lift(self) -> None:
        """Pop its hooks for now, if they are the innermost."""
        if self._is_innermost() and not _ours.lifted and private.current_graph_task_id() == -1:
            private.pop_hooks()
            self.pushed = False

    def pop(self) -> None:
        """Stop being one of this thread's pairs. Removes its hooks, even from beneath hooks that others left there.

        May be called again after an interrupted call.
        """
        if self in _ours.pairs:
            _ours.pairs.remove(self)
        self.unwatch()
        if not self.pushed:
            return
        mine = self.pack, self.unpack
        if mine in _ours.aside:
            _ours.aside.remove(mine)
            self.pushed = False
            return
        above = []
        while (top := private.top_hooks(True)) is not None:
            private.pop_hooks()
            if top == mine:
                break
            above.append(top)
        else:
            self._drop_left(above)
        _push(reversed(above))
        self.pushed = False

    def _is_innermost(self) -> bool:
        return self.pushed and private.top_hooks(True) == (self.pack, self.unpack)

    def was_taken(self) -> bool:
        """Note that hooks of others, which ended above a dead pair, popped its hooks instead of their own.

        What they left goes too. False if its hooks are still there, or if torch currently lets none be pushed back, so
        that nobody can look.
        """
        if not private.hooks_are_enabled():
            return False
        pairs = _take()
        taken = (self.pack, self.unpack) not in pairs
        if taken:
            self.pushed = False
            self._drop_left(pairs)
        _push(reversed(pairs))
        return taken

    def _drop_left(self, pairs: list[_Hooks]) -> None:
        """Drop the pair that was left when this one was popped instead: the innermost of others' beneath it."""
        still = 0
        for there, was in zip(reversed(pairs), reversed(self._beneath), strict=False):
            if there != was:
                break
            still += 1
        for place in range(len(pairs) - still, len(pairs)):
            if not _is_entered(pairs[place]):
                del pairs[place]
                return

    def is_dead(self, entering: weakref.ref[nn.Module] | None) -> bool:
        """Whether its forward has ended. If its model is `entering`, another forward of it has just begun."""
        if self._forward is None or not self._depth:
            return False
        return self._depth > _depth(self._forward) - (entering is not None and entering() is self._forward())


class _Ours(threading.local):
    """A thread's entered pairs, from the outermost."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.lifted = 0  # open regions of `lifted` and `bare`
        self.aside: list[_Hooks] = []  # off the stack while torch refuses hooks, from the outermost


_ours = _Ours()


def clear_dead(entering: weakref.ref[nn.Module] | None = None) -> None:
    """Pop the innermost pairs whose forward ended in a KeyboardInterrupt."""
    while _ours.pairs and (pair := _ours.pairs[-1]).is_dead(entering):
        if pair.pushed and not pair._is_innermost() and not pair.was_taken():
            return  # another pair is the innermost
        pair.pop()
        pair.on_dead(pair)


def _stack() -> list[_Hooks]:
    pairs = _take()
    _push(reversed(pairs))
    return pairs


def _take() -> list[_Hooks]:
    """Pop all pairs; return them from the innermost."""
    pairs = []
    while (top := private.top_hooks(True)) is not None:
        private.pop_hooks()
        pairs.append(top)
    return pairs


def _push(pairs: Iterable[_Hooks]) -> None:
    """Push back pairs, from the outermost, even if torch refuses hooks by now."""
    why = None
    if not private.hooks_are_enabled() and private.why_disabled and private.enable_hooks and private.disable_hooks:
        why = private.why_disabled()
        private.enable_hooks()
    for pair in pairs:
        private.push_hooks(*pair)
    if why is not None and private.disable_hooks:
        private.disable_hooks(why, False)


def _is_entered(pair: _Hooks) -> bool:
    return any(each.pushed and (each.pack, each.unpack) == pair for each in _ours.pairs)


def owners() -> list[object]:
    """List the owners of this thread's entered pairs, from the outermost."""
    return [pair.owner for pair in _ours.pairs]


def _depth(model: weakref.ref[nn.Module]) -> int:
    depth, frame = 0, sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is model():
            depth += 1
        frame = frame.f_back  # type: ignore[assignment]
    return depth


_CALL = nn.Module._call_impl.__code__
# When it calls closing hooks after a forward has raised, it swallows what they raise.
interrupts.takes_errors(_CALL)


@contextmanager
def lifted(pack: Pack) -> Iterator[None]:
    """Pop every pair at the top of the stack whose pack is `pack`, for a region.

    Other pairs stay; if one of them is innermost, ours does not act anyway. `torch.func` transforms, which refuse any
    active hooks, work in the region if ours are the only ones.
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
        if private.hooks_are_enabled() or not private.hooks_step_aside:
            _push(reversed(removed))
        else:
            _ours.aside += reversed(removed)


# -- replacements of torch's functions -------------------------------------------------------------------------------

_STEPS_ASIDE = "steps_aside"  # an attribute of pack hooks, as a backward's threads inherit the stack but not `_ours`


def steps_aside(pack: Pack | None = None) -> None:
    """Make pairs with this pack hook, or else the innermost pair of all, step aside when torch refuses hooks."""
    if pack is None:
        top = private.top_hooks(True)
        if top is None:
            return
        pack = top[0]
    with suppress(AttributeError, TypeError):  # objects that take no attributes
        setattr(getattr(pack, "__func__", pack), _STEPS_ASIDE, True)


def _disable(*args: Any, **kwargs: Any) -> None:
    """Refuse hooks on this thread, as torch's function does. Ours step aside for it if there are no others."""
    assert private.disable_hooks is not None
    refuses = kwargs.get("fail_if_non_empty", args[1] if len(args) > 1 else True)
    if refuses and (pairs := _take()):
        if all(getattr(getattr(pack, "__func__", pack), _STEPS_ASIDE, False) for pack, _ in pairs):
            _ours.aside += reversed(pairs)
        else:
            _push(reversed(pairs))
    try:
        private.disable_hooks(*args, **kwargs)
    finally:
        if private.hooks_are_enabled():  # it was called with wrong arguments
            _come_back()


def _enable() -> None:
    """Allow hooks on this thread again, as torch's function does, and bring back those that stepped aside."""
    assert private.enable_hooks is not None
    private.enable_hooks()
    _come_back()


def _come_back() -> None:
    pairs, _ours.aside = _ours.aside, []
    _push(pairs)


def _pop() -> None:
    """Pop a pair as torch's function does, but not one of ours above it."""
    if not _ours.pairs:  # no call comes first, so no signal: outside of our contexts nothing holds one back
        private.pop_hooks()
        return
    ours = []
    while (top := private.top_hooks(True)) is not None and _is_entered(top):
        private.pop_hooks()
        ours.append(top)
    if top is not None or not ours:
        private.pop_hooks()
    else:
        del ours[0]  # there is no other: the caller pops whatever is there
    _push(reversed(ours))


private.stand_in(private.pop_hooks, _pop)
if private.disable_hooks is not None and private.enable_hooks is not None and private.hooks_step_aside:
    private.stand_in(private.disable_hooks, _disable)
    private.stand_in(private.enable_hooks, _enable)


@contextmanager
def bare(in_hook: bool) -> Iterator[None]:
    """Take all hooks, ours and others', off this thread's stack for a region: a signal handler runs in it.

    Hooks must not see what a handler does: a block that runs twice saves the same tensors each time. `in_hook`: it is
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
    """The innermost pair of ours that is pushed on this thread, whatever others stand above it; else None."""
    if _ours.lifted or _ours.aside:
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


_REFUSED = "saved tensor hooks"  # part of the errors with which torch refuses active hooks
_HINT = (
    "tba: the hooks that torch refuses here are those of an offload_context or attach; call this inside "
    "`with offload.suspend():`, where nothing is offloaded"
)


def hint(error: BaseException | None) -> None:
    """Add a note on how to lift our hooks to an error with which torch refuses them, such as `torch.func.grad`'s.

    If ours can step aside, torch refuses others.
    """
    refused = isinstance(error, RuntimeError) and _REFUSED in str(error) and not private.hooks_step_aside
    if refused and _HINT not in getattr(error, "__notes__", ()):
        error.add_note(_HINT)  # type: ignore[union-attr]
