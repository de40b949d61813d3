"""Execution: carries out the plan of the step under way, in blocks and for records, and notes what it shows.

Guarantees: a block recomputes only if its second run has given equal bits (`Trial`), and one that talks to other ranks
only in forwards in which all of them recompute it (`Joint`); a storage moves by plan only where one of as many bytes
was seen in its place; outside its forward a model is as it was; what one thread is at, a block's forward or a trial,
says nothing about what others save and ask for.

The engine tells it of records, and blocks call it in place of their forwards; it calls the engine's hooks:

    engine  -- saved, joined, asked, freed, ... -->  execution  -- put -->  a block's forward
      ^                                                                            |
      |                                                                  recompute, Trial
      `------------------------- keep, give: the engine's hooks ------------------'

What blocks call (`_survey`, `_run`) runs without the engine's lock, and takes it for what it notes in the step; all
else wants it held, but `end_forward`.
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

from .._blocks.call import kept_of
from .._blocks.forwards import Forwards
from .._blocks.given import Given
from .._blocks.recompute import recompute
from .._blocks.shared_storages import AtHand
from .._blocks.timeline import Timeline
from .._blocks.trial import Trial
from .._blocks.watch import Watch
from .._config import OffloadConfig
from .._memory.ledger import Ledger
from .._plan import clock
from .._plan.facts import OUTSIDE
from .._plan.plan import Plan
from .._record.record import DERIVED, Record
from .._torch.private import recomputes, transforming
from .._transfer.cost import Cost
from .acted import Acted
from .joint import TRYING, Joint
from .kind import Kind
from .pace import Pace

_MOST_WATCHED = 1 << 16  # storages or blocks, after which forwards without a backward begin to be watched anew
_LOSSY = "under a lossy preset its gradients would depend on the plan"


class _Thread(threading.local):
    """What one thread is at.

    Attributes:
        block: whose forward it runs, by the number of the visit; OUTSIDE of all.
        aside: it does what is none of the step's own: the second run of a trial, say.
        at_hand: what that block was given, or what the last one has returned.
        saved_bytes: by it, before any codec.
    """

    block = OUTSIDE
    aside = False
    at_hand = AtHand()
    saved_bytes = 0


class Execution:
    """What becomes of the step under way, and what has been seen of it.

    Attributes:
        kind: of the step under way.
        follows: it does what one before did, and only what is to go has records.
        put_aside: numbers of records that a trial was the first to save; autograd may do so later.

    Args:
        kind: of a step before its first forward.
        cost: of the transfers of the step under way.
        joint: what ranks do together; None for one rank.
        lossy: whether a codec changes values. Blocks then never recompute: what they save in backward no codec sees.
        keep, give: the engine's hooks.
    """

    def __init__(
        self,
        config: OffloadConfig,
        model: Callable[[], nn.Module | None],
        kind: Kind,
        *,
        lock: threading.RLock,
        ledger: Ledger,
        cost: Cost,
        pace: Pace,
        joint: Joint | None,
        lossy: bool,
        keep: Callable[[Tensor], Any],
        give: Callable[[Any], Tensor],
    ) -> None:
        self.kind = kind
        self.put_aside: set[int] = set()
        self.follows = False
        self._model, self._lock = model, lock
        self._keep, self._give = keep, give
        self._ledger, self._cost, self._pace, self._joint = ledger, cost, pace, joint
        self._least_bytes = int(config.min_tensor_bytes)
        self._by_rule = config.policy == "tba"
        self._compresses, self._lossy = config.compress is not None, lossy
        self._may_derive = config.derive and not (self._compresses or self._by_rule)
        self._forwards = Forwards()
        self._spoilt = False  # the step under way tells nothing
        self._now: Watch | None = None
        self._thread = _Thread()

    @property
    def under_way(self) -> bool:
        """Whether anything has been seen of the step."""
        return self._now is not None

    @property
    def derives(self) -> bool:
        """Whether something of the step is derived by plan, or tried to be."""
        kind = self.kind
        return self._may_derive and (kind.blocks if kind.plan is None else bool(kind.plan.derived))

    @property
    def acted(self) -> Acted:
        """What has been done to the step, which is to end."""
        plan, seen = self.kind.plan, self._now
        return Acted(
            planned=plan is not None and not plan.idle,
            recomputed=plan is not None and bool(plan.recomputed),
            tried=seen is not None and bool(seen.trials),
        )

    @property
    def repeats(self) -> bool:
        """Whether the step is to do what others of its kind do, so that one can be written down for all."""
        return self.kind.plan is not None and not self._compresses

    # -- the step ----------------------------------------------------------------------------------------------------

    def take_for(self, kind: Kind) -> None:
        """Take the step for one of this kind, from here on."""
        self.kind = kind
        self._ledger.expect(kind.expected(tries=not self._lossy))

    def follow(self) -> None:
        """Have the step do what one before did."""
        self.follows = True
        self._seen().followed = True  # its time begins now

    def depart(self, departs: bool) -> None:
        """Note that the step cannot be followed any more; if it `departs`, that it is another one."""
        self.follows, self._seen().departed = False, True
        self._spoilt = self._spoilt or not departs

    def spoil(self) -> None:
        """Note that the step tells nothing: another plan has begun in the midst of it."""
        self._spoilt = True

    def end(self) -> Watch | None:
        """End the step; return what was seen of it, if that tells anything."""
        seen = None if self._spoilt else self._now
        self.forget()
        return seen

    def forget(self) -> None:
        """Begin the step anew: nothing is left of what it has saved."""
        self._now, self.follows, self._spoilt = None, False, False
        self.put_aside.clear()
        self._ledger.forget_replays()

    # -- the model's forward, and its blocks' ------------------------------------------------------------------------

    def begin_forward(self, kind: Kind) -> None:
        """Begin a forward of a step of this kind, and stand around the model's blocks."""
        seen = self._now
        if seen is not None and max(len(seen.saved), len(seen.visits)) > _MOST_WATCHED:
            self._now = None
        self.take_for(kind)
        self._thread.block = OUTSIDE
        modules = kind.around()
        if modules and not torch.compiler.is_compiling():
            self._forwards.put(modules, self._run if kind.blocks else self._survey)

    def end_forward(self) -> None:
        """End it."""
        self._forwards.remove()
        self._thread.block = OUTSIDE

    def go_on_in_child(self, lock: threading.RLock) -> None:
        """In a forked child: a forward that is under way goes on, with the engine's new lock, and alone."""
        self._lock, self._joint = lock, None

    @interrupts.lets_through
    def _survey(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module that may be a block; count what it saves."""
        thread, seen = self._thread, self._seen()
        before = thread.saved_bytes
        try:
            return forward(*args, **kwargs)
        finally:
            with self._lock:
                seen.inside[module] = seen.inside.get(module, 0) + thread.saved_bytes - before

    @interrupts.lets_through
    def _run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block: as it is, again in backward, or to be tried."""
        thread = self._thread
        if thread.aside or not recomputes or not torch.is_grad_enabled() or transforming():
            return forward(*args, **kwargs)
        if thread.block != OUTSIDE:
            return self._run_part(module, forward, args, kwargs)
        if weakref.ref(module) in self.kind.parts:
            return forward(*args, **kwargs)
        with self._lock:
            seen = self._seen()
            visit = thread.block = seen.visit(module, self._at(seen), kept_of(args, kwargs))
        thread.at_hand = AtHand((args, kwargs))
        out = None
        try:
            out = self._call(visit, module, forward, args, kwargs)
            return out
        finally:
            thread.block, thread.at_hand = OUTSIDE, AtHand(out)

    @interrupts.lets_through
    def _run_part(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a part of the block that is under way."""
        thread, plan, seen = self._thread, self.kind.plan, self._seen()
        block = thread.block
        if plan is not None:
            parts = (each for each in plan.recomputed if plan.facts.blocks[each].within == block)
            part = next((each for each in parts if self.kind.visits[each]() is module), None)
        elif self._by_rule or self._lossy or (self._joint is not None and self._joint.phase is TRYING):
            part = None  # ranks agree on whole blocks
        else:
            with self._lock:
                part = seen.visit_part(block, module, self._at(seen), kept_of(args, kwargs))
        if part is None or part in seen.ran:
            return forward(*args, **kwargs)
        thread.block = part
        try:
            return self._call(part, module, forward, args, kwargs)
        finally:
            thread.block = block
            with self._lock:
                if plan is None:
                    seen.leave_part(part, self._at(seen))
                else:
                    seen.ran.add(part)
                    seen.counts[block] = plan.facts.blocks[part].last

    @interrupts.lets_through
    def _call(self, visit: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        seen, kind, joint = self._seen(), self.kind, self._joint
        if kind.plan is not None:
            if visit in kind.plan.recomputed and kind.visits[visit]() is module:
                if joint is None or kind.decision is None or visit not in kind.decision.joint:
                    return self._recompute(visit, kind.plan, module, forward, args, kwargs)
                if ranks := joint.together_with:
                    return self._recompute(visit, kind.plan, module, forward, args, kwargs, ranks)
        elif not self._lossy:
            ballot = None if joint is None else joint.ballot(visit)
            within = seen.trials.get(seen.whole(visit)) if visit < OUTSIDE else None
            trial = Trial(module, forward, self._keep, self._give, self.apart, ballot, within)
            seen.trials[visit] = trial
            return trial.call(args, kwargs)
        return forward(*args, **kwargs)

    @interrupts.lets_through
    def _recompute(
        self,
        visit: int,
        plan: Plan,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        together: frozenset[int] | None = None,
    ) -> Any:
        """Run a block that runs again in backward, and count what it would have saved beside what it has."""
        with self._lock:
            before_bytes = self._ledger.plain_bytes
        out, graph = recompute(module, forward, args, kwargs, self._keep, self._give, together)
        if graph is not None:
            with self._lock:
                saved_bytes = self._ledger.plain_bytes - before_bytes
                nbytes = max(0, plan.facts.replayed_bytes(visit) - saved_bytes)
                self._ledger.recompute(graph, nbytes, plan.facts.blocks[visit].small_bytes)
                self._seen().replays.append(graph.took)
        return out

    # -- saved tensors -----------------------------------------------------------------------------------------------

    def saved(self, record: Record) -> bool:
        """Note a new record, or one that a trial was the first to save; whether it is to go by plan."""
        seen, kind, thread = self._seen(), self.kind, self._thread
        if thread.aside:
            self.put_aside.add(record.number)
            return False
        if seen.turned:
            return False
        if self.follows:
            return not record.follows  # it has a record because it is to go, or to be derived
        self.put_aside.discard(record.number)
        nbytes = record.plain_bytes
        seen.nbytes += nbytes
        thread.saved_bytes += nbytes
        if kind.plan is None:
            seen.saved[record.number] = seen.place(thread.block), nbytes, self._at(seen)
            return False
        if seen.departed:
            return False
        place = kind.places.find(seen, thread.block, thread.at_hand, record.root(), nbytes)
        if place is None:
            seen.departed = thread.block not in kind.plan.recomputed
            return False
        if self._compresses:
            seen.saved[record.number] = place, nbytes, 0.0
        if place in kind.plan.derives:
            record.follow()
        return place in kind.plan.sends

    def tries(self, record: Record) -> bool:
        """Whether it is to be found out what making a record again from others takes: a plan is to be made next."""
        seen, kind = self._now, self.kind
        return (
            self._may_derive and kind.plan is None and kind.blocks and seen is not None and record.number in seen.saved
        )

    def derivable(self, record: Record, seconds: float, sources: list[int]) -> None:
        """Note that making a record again from those of these numbers takes so long, and gives the same bits."""
        self._seen().derivable[record.number] = seconds, sources

    def joined(self, record: Record) -> bool:
        """Note that a record is saved once more; whether that makes it the step's: a trial was the first to save it."""
        if record.number in self.put_aside:
            if self.saved(record):
                record.go()
            return record.number not in self.put_aside
        elif self._now is not None and not (self._thread.aside or self._now.turned):
            if self.kind.plan is None:
                self._now.again(self._thread.block, record.number, self._thread.at_hand, record.root())
            else:
                self._now.saved_elsewhere.add(self._thread.block)
        return False

    def packed(self, record: Record) -> None:
        """Note that a record's operator has finished; what a codec has left of it, or that others give it again."""
        if (seen := self._now) is not None:
            if self._compresses:
                seen.held[record.number] = 0 if record.state is DERIVED else record.nbytes
            if self.kind.plan is None:
                seen.ready(record.number, self._at(seen))

    def asked(self, record: Record | None) -> None:
        """Note that backward asks for a record, or for what was let pass without one."""
        seen = self._now
        if seen is None or self._thread.aside:
            return
        seen.turned = True
        seen.step_s = clock.current.now_s() - seen.begun_s
        if seen.timeline is not None:
            seen.timeline.touch()
        if record is not None and self.kind.plan is None and record.number not in seen.asked:
            seen.asked[record.number] = self._at(seen)

    def freed(self, number: int) -> None:
        """Note that a record has died."""
        if self._now is not None and self.kind.plan is None:
            self._now.freed[number] = len(self._now.asked)

    def _seen(self) -> Watch:
        if (seen := self._now) is not None:
            return seen
        with self._lock:
            if (seen := self._now) is None:
                untried = _LOSSY if self._lossy else "its second run was not seen"
                given = Given(self._least_bytes), Given(self._least_bytes)
                timeline = Timeline.of(self._model())
                seen = Watch(clock.current.now_s(), untried=untried, timeline=timeline, given=given)
                self._cost.mark_waits(seen.timeline)
                self._ledger.watch_peak()
                self._now = seen  # last: others look at it without the lock
            return seen

    def _at(self, seen: Watch) -> float:
        """Seconds of computation since the step began, by the host's clock; marked on the device, if there is one."""
        at_s = self._pace.at(seen)
        if seen.timeline is not None and self.kind.plan is None:
            seen.timeline.mark(at_s)
        return at_s

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Do what is none of the step's own: neither its tensors nor its time count."""
        thread, seen = self._thread, self._seen()
        since_s = self._pace.at(seen)
        begun = seen.timeline.step_aside() if seen.timeline is not None else None
        begun_work = self._cost.begin_work()
        within, thread.aside = thread.aside, True
        try:
            yield
        finally:
            thread.aside = within
            with self._lock:
                seen.aside_s += self._pace.at(seen) - since_s
                self._cost.leave_out(self._cost.begin_work() - begun_work)
                if seen.timeline is not None:
                    seen.timeline.step_back(begun)
