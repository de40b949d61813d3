"""Recompute: calls a block's forward so that what it saves is let go of, and made again when backward asks.

Guarantees:

1. The graph is that of the program's own call, made by it alone; a second call gives values to what the first saved.
2. What the first call saves is let go of once it has ended, if it has changed nothing that a second would find changed
   and has not communicated. Otherwise it is kept as all that autograd saves, and there is no second call.
3. A second call finds what the first found, whatever has become of it since, and leaves no trace.
4. What the second call makes is held until it is asked for, once; asked for again, it is made again.
5. A call that communicates runs again only together with all ranks that it exchanges data with. Then it does whenever
   anything of it is asked for, on each of them: whether this rank has let go of what it saved is its own matter. Where
   it has not, what the second call makes is compared with what was kept.

Without these, torch.utils.checkpoint would do.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from io_backends import interrupts

from .._errors import OffloadError, edited_in_place
from .._plan import clock
from .._state.found import Found
from .._state.holders import version
from .._torch import modes
from .._torch.hook_stack import steps_aside
from .._torch.private import sizes
from .call import Call, as_saved, same, shape
from .communication import Communication

Keep = Callable[[Tensor], Any]
Give = Callable[[Any], Tensor]


@interrupts.lets_through
def recompute(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    keep: Keep,
    give: Give,
    together: frozenset[int] | None = None,
) -> tuple[Any, _Twice | None]:
    """Call a block's forward; it runs again in backward, if that can be.

    It runs once where what it finds cannot be read, a mode of the program's is on, or it turns out to change anything.

    Args:
        keep, give: packs a tensor as autograd's saved tensors are, and gives it back.
        together: ranks that all call this block now, and run it again alike; None where this one is alone.

    Returns:
        What it returns, and what lives as long as the graph that it may run again for, with what that takes (`took`);
        None where it will not.

    Raises:
        OffloadError: by `backward`: its weights, or a large tensor that it reaches, were edited in place since; or, at
            once, if it cannot run again where others count on it.
        RuntimeError: by `backward`, PyTorch's own: what it was given was edited in place since.
    """
    watched = modes.programs()
    if watched and together is None:
        return forward(*args, **kwargs), None
    found = Found.of(module, forward, args, kwargs)
    if found.unseen:
        if together is not None:
            raise OffloadError(_cannot(module, found.unseen))
        return forward(*args, **kwargs), None
    twice = _Twice(module, forward, Call(module, args, kwargs, found), keep, give)
    steps_aside(twice.pack)
    with torch.autograd.graph.saved_tensors_hooks(twice.pack, twice.unpack), Communication() as communication:
        out = forward(*args, **kwargs)
    if together is not None and not communication.is_among(together):
        raise OffloadError(_cannot(module, "it communicates with ranks that have not agreed to that"))
    alone = together is None and communication.possible
    with twice.took.counts():
        again = twice.settle(stays=watched or alone, joint=together is not None)
    return out, twice if again else None


def _cannot(module: nn.Module, why: str) -> str:
    return (
        f"{type(module).__name__} was to recompute together with other ranks, and cannot: {why}. Name other blocks "
        "(blocks=), or set rank_timeout=0, with which ranks plan alone and no block that communicates recomputes"
    )


class _Saved:
    """A tensor that the first call has saved; the graph holds it.

    Attributes:
        tensor: what was saved, until the call has ended, and beyond where it was edited in the call; what a second
            call has made, until it is asked for; else None.
        version: of what was saved.
        kept: a tuple of what the engine has made of it, where there is no second call; else None.
    """

    __slots__ = ("__weakref__", "kept", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: an operator's own result, held by the node that made it, would be a cycle that nobody collects.
        self.tensor: Tensor | None = tensor if tensor.is_leaf else tensor.detach()
        self.version = version(tensor)
        self.kept: tuple[Any] | None = None


class Took:
    """What running again has taken, which outlives the graph.

    Attributes:
        seconds: by the host's clock: of second calls, and of what the first one saves for them.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counts(self, *, but: bool = False) -> Iterator[None]:
        """Count a region, or leave it out of one that counts."""
        begun_s = clock.current.now_s()
        try:
            yield
        finally:
            took_s = clock.current.now_s() - begun_s
            self.seconds += -took_s if but else took_s


class _Enough(BaseException):
    """Ends a second call that has made all that is wanted; no Exception, which code around it would catch."""


class _Twice:
    """A call that may run again, and what it has saved.

    Attributes:
        took: what its second calls have taken.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], call: Call, keep: Keep, give: Give) -> None:
        self.took = Took()
        self._name = type(module).__name__
        self._forward = forward
        self._call = call
        self._keep, self._give = keep, give
        self._saved: list[tuple[weakref.ref[_Saved], tuple[Any, ...]]] = []
        self._again = False  # it has let go of what it saved
        self._joint = False  # it runs again even if it has not
        self._lock = threading.RLock()  # nodes of several devices may ask at once
        call.keep(keep, positional=True)

    def pack(self, tensor: Tensor) -> _Saved:
        """Pack what the first call saves."""
        saved = _Saved(tensor)
        self._saved.append((weakref.ref(saved), shape(tensor)))
        return saved

    def settle(self, *, stays: bool, joint: bool = False) -> bool:
        """End the first call: let go of what it has saved, or keep it if it `stays` or anything has changed.

        `joint`: other ranks count on its second call. Whether it was let go of.
        """
        self._joint = joint
        self._again = not (stays or self._call.change())
        self._call.end()
        for reference, _ in self._saved:
            saved = reference()
            if saved is None or saved.tensor is None:
                continue
            if self._again:
                saved.tensor = None
            elif version(saved.tensor) == saved.version:
                saved.kept, saved.tensor = (self._keep(saved.tensor),), None
        return self._again

    def unpack(self, saved: _Saved) -> Tensor:
        """Unpack what the first call has saved. Raises what `recompute` says."""
        if saved.kept is not None:
            kept = self._give(saved.kept[0])
            if self._joint and not same(kept, self._made(saved)):
                raise OffloadError(f"{self._name} recomputes together with other ranks, and gives other values then")
            return kept
        if not self._again:
            assert saved.tensor is not None
            if version(saved.tensor) != saved.version:
                tensor = saved.tensor
                raise edited_in_place(f"{tensor.type()} {list(sizes(tensor))}", version(tensor), saved.version)
            return saved.tensor
        return self._made(saved)

    def _made(self, saved: _Saved) -> Tensor:
        """Give what a second call has made."""
        with self._lock:
            if saved.tensor is None:
                self._run_again()
            made, saved.tensor = saved.tensor, None
            assert made is not None
            return made

    def _run_again(self) -> None:
        """Make what the first call has saved and is still held by the graph."""
        if lost := self._call.found.lost():
            raise OffloadError(
                f"{self._name} recomputes, and {lost} was edited in place since its forward: gradients would be wrong. "
                "Edit it after backward, or name other blocks (blocks=)"
            )
        wanted = {number for number, (reference, _) in enumerate(self._saved) if reference() is not None}
        number = 0

        def note(tensor: Tensor) -> Tensor:
            nonlocal number
            if number >= len(self._saved) or self._saved[number][1] != shape(tensor):
                raise OffloadError(self._differs(f"a tensor {shape(tensor)}, its {number}th"))
            # The sizes of jagged tensors belong to the very tensor of their offsets.
            made = tensor if tensor.is_leaf and not tensor.requires_grad else tensor.detach()
            if (saved := self._saved[number][0]()) is not None and saved.tensor is None:
                saved.tensor = made
            wanted.discard(number)
            number += 1
            if not wanted:
                raise _Enough
            return made

        try:
            with self.took.counts(), self._call.repeated(self._bring, note, as_saved) as (args, kwargs):
                self._forward(*args, **kwargs)
        except _Enough:
            return
        if wanted:
            raise OffloadError(self._differs(f"only {number} tensors"))

    def _bring(self, kept: Any) -> Tensor:
        """Give back what it was given, which may have to be waited for."""
        with self.took.counts(but=True):
            return self._give(kept)

    def _differs(self, what: str) -> str:
        return (
            f"{self._name} recomputes and saves other tensors when it runs again, which it did not when it was tried: "
            f"{what}, where its forward saved {len(self._saved)}. Name other blocks (blocks=)"
        )
