"""Trial: runs a block's forward a second time when backward reaches it, and tells whether that is the same.

A block that recomputes must give in backward what it gave in forward. Nobody can tell from outside whether it does: it
may read what a hook has left somewhere, write to a cache, update buffers or route at random. So each block is watched
in a step that saves everything. What its call may change is read before it (`_state`): a block that has changed any of
it is not tried, nor is one of which not all can be read. Of the others, inputs and outputs are kept as autograd's own
saved tensors are, and compared with those of a second run, at the point where a recomputation would run. That run finds
what the first one found, and leaves no trace. The step itself does not depend on it.

A block that communicates runs a second time only if all ranks that it exchanges data with vote for it (`Ballot`): then
each of them has come to the same point of the same backward, and their collectives meet. So does one whose parts gather
weights, which its second run may find gathered. Assumption: where a second run raises, or exchanges other data than the
first, it does so on all of them.

It is the same if outputs are equal bit for bit and it saves tensors of the same shapes in the same order. The graph
that backward goes through is that of the first run, the program's own call. Nothing that a second run saves is kept: it
would add to what the step holds just where memory is short, and allocators would keep the pages long afterwards. Where
its forward runs backward through its own graph (for gradients of gradients, say), it runs once more, and all is kept to
the end of that run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from io_backends import interrupts

from .._errors import OffloadError
from .._group.agreement import Ballot
from .._state.found import Found, fingerprint
from .._state.gathered import gathers
from .._torch import modes
from .._torch.hook_stack import steps_aside
from .._torch.private import innermost, tree_leaves
from .call import Call, same, shape
from .communication import Communication
from .timeline import Stopwatch


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
        ballot: the vote of those ranks on it, to be used once; None where this one is alone with its plans.
        within: the trial of the block that this is a part of, which sees what both save.

    Attributes:
        verdict: None until there is one.
        joint: the block communicates, and may run again if the ranks vote for it.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        keep: Callable[[Tensor], Any],
        give: Callable[[Any], Tensor],
        apart: Callable[[], AbstractContextManager[None]],
        ballot: Ballot | None = None,
        within: Trial | None = None,
    ) -> None:
        self.verdict: Verdict | None = None
        self.joint = False
        self._gathers = False  # its parts do, weights
        self._saved: list[tuple[Any, ...]] = []  # by the first run
        self._within = within
        self._ballot = ballot  # until it was used
        self._module = module
        self._forward = forward
        self._keep = keep
        self._give = give
        self._apart = apart

    @interrupts.lets_through
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the forward for the first time, and have it tried when backward comes to what it returns."""
        if modes.programs():  # before anything is read, which a mode might count
            self._tell("a mode of the program's is on, which sees what runs")
            return self._forward(*args, **kwargs)
        with self._apart():
            found = Found.of(self._module, self._forward, args, kwargs, tries=True)
            if not found.unseen:
                call = Call(self._module, args, kwargs, found)
                self._gathers = gathers(self._module)
                weights = self._weights()
        if found.unseen:
            self._tell(found.unseen)
            return self._forward(*args, **kwargs)
        steps_aside(self._note)
        with torch.autograd.graph.saved_tensors_hooks(self._note, self._give), Communication() as communication:
            out = self._forward(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        given = set(map(id, call.tensors))
        made = (each for each in reversed(outputs) if each.requires_grad and not each.is_leaf and id(each) not in given)
        last = next(made, None)
        with self._apart():
            exchanges = communication.possible or (self._gathers and bool(communication.counts))
            if last is None:
                self._tell("its output needs no gradient")
            elif exchanges and not self._is_joint(communication):
                self._tell("it communicates with other ranks, which have not agreed to repeat that")
            elif any(
                part.layout is not torch.strided or part.is_nested for each in outputs for part in innermost(each)
            ):
                self._tell("it returns a sparse or nested tensor, which is not compared")
            elif change := call.change():
                self._tell(f"it changes {change}")
            elif not all(map(torch.equal, weights, self._weights())):
                self._tell("it changes its weights")
            else:
                call.keep(self._keep)
                call.end()
                self.joint = exchanges
                # What DTensors wrap is saved by the next block as a tensor of its own, which would find the record of
                # the output here, or not, depending on whether that has been copied: copies have other records.
                own = (each.detach().clone() if self.joint else each for each in outputs)
                kept = [self._keep(each) for each in own]
                first = [_First(call, self._saved, kept, communication.counts)]
                # After all hooks of the tensor: those of FSDP gather the weights that the second run needs.
                last.grad_fn.register_prehook(lambda _: self._try(first))  # type: ignore[union-attr]
        return out

    def _weights(self) -> list[Tensor]:
        return [] if self._gathers else fingerprint(list(self._module.parameters()))  # some may be gathered, or not

    def _note(self, tensor: Tensor) -> Any:
        """Pack what the first run saves."""
        self._saved.append(shape(tensor))
        return self._keep(tensor) if self._within is None else self._within._note(tensor)

    def _is_joint(self, communication: Communication) -> bool:
        return self._ballot is not None and communication.is_among(self._ballot.members)

    def _try(self, first: list[_First]) -> None:
        if first:  # else it is a second backward through the graph
            with self._apart():
                self._tell(*self._run_again(first.pop()))

    def _run_again(self, first: _First) -> tuple[str, float | None]:
        """Run it again; returns why that is not the same, or "" and the seconds until it saved its last tensor."""
        if lost := first.call.found.lost():
            return f"{lost} was edited before backward", None
        tracer = interrupts.tracer()
        try:
            before = [self._give(kept).detach() for kept in first.outputs]
            for keeps in (False, True):
                again = _Noted(keeps=keeps)
                with first.call.repeated(self._give, again, again.give) as (args, kwargs):
                    if not keeps and not self._may_run():
                        return "it communicates with other ranks, one of which could not try it", None
                    found = self._compare(first, before, again, args, kwargs)
                if not again.lacks:
                    break
        except (OffloadError, RuntimeError) as error:
            interrupts.pass_on(error, tracer)
            return "what it was given or returned was edited, or could not be read back", None
        return found

    def _may_run(self) -> bool:
        """Whether the block may run again: all ranks come to it here that it exchanges data with."""
        ballot, self._ballot = self._ballot, None
        return not self.joint or (ballot is not None and ballot.agrees())

    def _compare(
        self, first: _First, before: list[Tensor], again: _Noted, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, float | None]:
        again.begin(before[0] if before else None)
        tracer = interrupts.tracer()
        try:
            with Communication() as communication:
                out = self._forward(*args, **kwargs)
        except Exception as error:
            interrupts.pass_on(error, tracer)
            return f"its second run raises {type(error).__name__}", None
        after = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if change := first.call.found.block.change():
            return f"its second run changes {change}", None
        differs = sum(communication.counts) != sum(first.counts) and not self._gathers
        if differs or (communication.possible and not self.joint):
            return "its second run communicates otherwise with other ranks", None
        if first.saved != again.shapes:
            return "its second run saves other tensors", None
        if not (len(after) == len(before) and all(map(same, before, after))):
            return "its second run gives other values", None
        return "", again.seconds

    def _tell(self, why_not: str, seconds: float | None = None) -> None:
        if self.verdict is None:
            self.verdict = Verdict(seconds, why_not)
            if self._ballot is not None:  # it was not asked for
                self._ballot.refuse()


class _First(NamedTuple):
    """The first run: its call, what it saved, what it returned, kept, and what it exchanged with other ranks."""

    call: Call
    saved: list[tuple[Any, ...]]
    outputs: list[Any]
    counts: list[int]


class _Noted:
    """Hooks of the second run: they note what that saves, and keep it only if `keeps` is set.

    Attributes:
        shapes: of what it has saved.
        lacks: its forward has asked for what was not kept.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.shapes: list[tuple[Any, ...]] = []
        self.lacks = False
        self._keeps = keeps
        self._watch: Stopwatch | None = None

    def begin(self, tensor: Tensor | None) -> None:
        """Begin the run, on the device of a tensor."""
        self._watch = Stopwatch(tensor)

    @property
    def seconds(self) -> float:
        """Seconds until it saved its last tensor."""
        return 0.0 if self._watch is None else self._watch.seconds

    def __call__(self, tensor: Tensor) -> Tensor | None:
        """Pack a tensor."""
        if self._watch is not None:
            self._watch.lap()
        self.shapes.append(shape(tensor))
        kept = tensor.detach()  # as a recomputation does, and its time counts
        return kept if self._keeps else None

    def give(self, kept: Tensor | None) -> Tensor:
        """Unpack it. Raises RuntimeError if it was not kept."""
        if kept is None:
            self.lacks = True
            raise RuntimeError("the trial of a block has not kept what its second run saved")
        return kept
