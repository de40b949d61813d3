"""Trial: runs a block's forward a second time when backward reaches it, and tells whether that is the same.

A block that recomputes must give in backward what it gave in forward. Nobody can tell from outside whether it does: it
may read what a hook has left somewhere, write to a cache, update buffers or route at random. So each block is watched
in a step that saves everything. What its call may change is read before it (`_state`): a block that has changed any of
it is not tried, nor is one of which not all can be read. Of the others, inputs and outputs are kept as autograd's own
saved tensors are, and compared with those of a second run, at the point where a recomputation would run. That run finds
what the first one found, and leaves no trace. The step itself does not depend on it.

It is the same if outputs are equal bit for bit and it saves tensors of the same shapes in the same order. The graph
that backward goes through is that of the first run, the program's own call; a second run gives saved values alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from io_backends import interrupts

from .._plan import clock
from .._state.found import Found, fingerprint, plain_leaves
from .._state.holders import equal_bits
from .._torch import modes
from .._torch.hook_stack import steps_aside
from .._torch.private import innermost
from .communication import Communication, gathers


@dataclass(frozen=True)
class Verdict:
    """What a trial has found.

    Attributes:
        seconds: that the second run took until it had saved the last tensor, which is where PyTorch ends a
            recomputation; None if the block must not recompute.
        why_not: why, then.
    """

    seconds: float | None
    why_not: str = ""


class Trial:
    """A call of a block's forward, to be tried again.

    Args:
        keep, give: packs a tensor as autograd's saved tensors are, and gives it back.
        apart: makes a context for what is none of the step's own.
        report: gets the verdict.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        keep: Callable[[Tensor], Any],
        give: Callable[[Any], Tensor],
        apart: Callable[[], AbstractContextManager[None]],
        report: Callable[[Verdict], None],
    ) -> None:
        self._module = module
        self._forward = forward
        self._keep = keep
        self._give = give
        self._apart = apart
        self._report: Callable[[Verdict], None] | None = report

    @interrupts.lets_through
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the forward for the first time, and have it tried when backward comes to what it returns."""
        if modes.programs():  # before anything is read, which a mode might count
            self._tell("a mode of the program's is on, which sees what runs")
            return self._forward(*args, **kwargs)
        with self._apart():
            found = Found.of(self._module, self._forward, args, kwargs)
        if found.unseen:
            self._tell(found.unseen)
            return self._forward(*args, **kwargs)
        with self._apart():
            first = First(self._module, args, kwargs, found)

        def note(tensor: Tensor) -> Any:
            first.saved.append(_shape(tensor))
            return self._keep(tensor)

        steps_aside(note)
        with torch.autograd.graph.saved_tensors_hooks(note, self._give), Communication() as communication:
            out = self._forward(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        given = set(map(id, first.tensors))
        made = (each for each in reversed(outputs) if each.requires_grad and not each.is_leaf and id(each) not in given)
        last = next(made, None)
        with self._apart():
            if last is None:
                self._tell("its output needs no gradient")
            elif communication.possible or gathers(self._module):
                self._tell("it communicates with other ranks, which may plan otherwise")
            elif any(tensor.layout is not torch.strided or tensor.is_nested for tensor in outputs):
                self._tell("it returns a sparse or nested tensor, which is not compared")
            elif change := first.change():
                self._tell(f"it changes {change}")
            else:
                first.keep(outputs, self._keep)
                # After all hooks of the tensor: those of FSDP gather the weights that the second run needs.
                last.grad_fn.register_prehook(lambda _: self._try(first))  # type: ignore[union-attr]
        return out

    def _try(self, first: First) -> None:
        if self._report is None:
            return  # a second backward through the graph
        with self._apart():
            self._tell(*self._run_again(first))

    def _run_again(self, first: First) -> tuple[str, float | None]:
        """Run it again; returns why that is not the same, or "" and the seconds until it saved its last tensor."""
        try:
            args, kwargs, before = first.take(self._give)
        except Exception:
            return "what it was given or returned was edited, or could not be read back", None
        saved: list[tuple[Any, ...]] = []
        begun_s = saved_s = 0.0

        def note(tensor: Tensor) -> None:
            nonlocal saved_s
            saved_s = clock.current.now_s()
            saved.append(_shape(tensor))

        if lost := first.found.lost():
            return f"{lost} was edited before backward", None
        with first.found.as_found(), modes.without_programs():
            try:
                with first.surroundings.restored(note), Communication() as communication:
                    begun_s = saved_s = clock.current.now_s()
                    out = self._forward(*args, **kwargs)
            except Exception as error:
                return f"its second run raises {type(error).__name__}", None
            after = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            if change := first.found.block.change():
                return f"its second run changes {change}", None
            if communication.possible:
                return "its second run communicates with other ranks", None
            if first.saved != saved:
                return "its second run saves other tensors", None
            if not (len(after) == len(before) and all(map(_equal, before, after))):
                return "its second run gives other values", None
        return "", saved_s - begun_s

    def _tell(self, why_not: str, seconds: float | None = None) -> None:
        report, self._report = self._report, None
        if report is not None:
            report(Verdict(seconds, why_not))


class First:
    """The first call of a block's forward, and what a second one needs of it.

    Attributes:
        found: what it found.
        tensors: that it was given, in order.
        saved: what it has saved, in order.
        surroundings: what it began in.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: Found) -> None:
        self.found = found
        self.tensors = [leaf for leaf in plain_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = {id(each): number for number, each in enumerate(self.tensors)}
        self._values = _replaced((args, kwargs), lambda leaf: _Place(places[id(leaf)]))  # lists may grow in the call
        self.saved: list[tuple[Any, ...]] = []
        self.surroundings = _Surroundings()
        self._versions = [each._version for each in self.tensors if not each.is_inference()]
        self._weights = list(module.parameters())
        self._sums = fingerprint(self._weights)
        self._kept: list[tuple[Any, bool]] = []
        self._outputs: list[Any] = []

    def change(self) -> str:
        """Name what it has changed that a second call would find changed; "" if there is nothing."""
        if change := self.found.block.change():
            return change
        if self._versions != [each._version for each in self.tensors if not each.is_inference()]:
            return "what it is given"
        if lost := self.found.given.lost():
            return f"{lost} that it is given"
        return "" if all(map(torch.equal, self._sums, fingerprint(self._weights))) else "its weights"

    def keep(self, outputs: Sequence[Tensor], keep: Callable[[Tensor], Any]) -> None:
        """Keep what it was given and has returned, as saved tensors are kept."""
        self._kept = [(keep(each), each.requires_grad) for each in self.tensors]
        self._outputs = [keep(each) for each in outputs]
        self.tensors, self._weights = [], []  # which the graph or the store has, as for all that is saved

    def take(self, give: Callable[[Any], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Give arguments for a second call, and what the first returned."""
        tensors = [give(kept).detach().requires_grad_(needs) for kept, needs in self._kept]
        outputs = [give(kept).detach() for kept in self._outputs]
        self._kept, self._outputs = [], []
        args, kwargs = _filled(self._values, tensors)
        return args, kwargs, outputs


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor among arguments."""

    number: int


def _replaced(value: Any, by: Callable[[Tensor], Any]) -> Any:
    """Copy tuples, lists and dictionaries that are nothing else, with something else in place of each tensor."""
    if type(value) in (tuple, list):
        return type(value)(_replaced(each, by) for each in value)
    if type(value) is dict:
        return {key: _replaced(each, by) for key, each in value.items()}
    return by(value) if isinstance(value, Tensor) else value


def _filled(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Copy such containers with tensors in their places again."""
    if type(value) in (tuple, list):
        return type(value)(_filled(each, tensors) for each in value)
    if type(value) is dict:
        return {key: _filled(each, tensors) for key, each in value.items()}
    return tensors[value.number] if isinstance(value, _Place) else value


class _Surroundings:
    """The state of random generators and of autocast that a forward begins in."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        kinds = ("cpu", "cuda") if self._cuda else ("cpu",)
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored(self, note: Callable[[Tensor], None]) -> Iterator[None]:
        """Restore it for a region whose graph is never gone through: what it would save is noted and let go."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=range(len(self._cuda))))
            torch.set_rng_state(self._cpu)
            if self._cuda:
                torch.cuda.set_rng_state_all(self._cuda)
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._cache))
            stack.enter_context(torch.enable_grad())
            steps_aside(note)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(note, _never))
            yield


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, *tensor.shape


def _never(_: None) -> Tensor:
    raise AssertionError("backward through a trial")


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit; of DTensors the parts that this rank has, as it is alone with them."""
    parts, others = innermost(one), innermost(other)
    return one.shape == other.shape and len(parts) == len(others) and all(map(equal_bits, parts, others))
