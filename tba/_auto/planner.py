"""Planner: watches the steps of tier "auto", plans those that memory has no room for, and carries plans out.

Steps of one kind give the model tensors of equal shapes. Of each kind, a first step that does not fit tells which
modules are the model's blocks; the next when each storage is saved and wanted, what the link carries, and which blocks
may recompute; the third is planned. Until then, and from where a step departs from what was seen, the rule of
`WriteBehind` alone holds: over budget, the oldest goes first. It stays beneath every plan. A storage counts with the
bytes that a codec leaves of it, which are what is kept and what moves.

Guarantees: a block recomputes only if its second run has given equal bits (`Trial`), and one that talks to other ranks
only in forwards in which all of them recompute it (`Joint`); a storage moves by plan only where one of as many bytes
was seen in its place; outside its forward a model is as it was; what one thread is at, a block's forward or a trial,
says nothing about what others save and ask for.

The saver calls the planner, and the planner calls back the saver's hooks alone, from within blocks:

    saver  -- saved, joined, asked, freed, ... -->  planner  -- put -->  a block's forward
      ^                                                                        |
      |                                                              recompute, Trial
      `------------------------ keep, give: the engine's hooks ----------------'

`meet`, `end_forward` and what blocks call (`_survey`, `_run`) run without the engine's lock, and take it for what they
note in the step; all else wants it held.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from io_backends import interrupts

from .._blocks import find
from .._blocks.call import kept_of
from .._blocks.forwards import Forwards
from .._blocks.given import Given
from .._blocks.recompute import recompute
from .._blocks.shared_storages import AtHand
from .._blocks.timeline import Timeline
from .._blocks.trial import Trial
from .._blocks.watch import Places, Watch
from .._config import OffloadConfig
from .._errors import BudgetError
from .._group.decision import Decision, Share
from .._memory.ledger import Ledger
from .._memory.pressure import release
from .._plan import clock
from .._plan.facts import OUTSIDE, Cap, Facts, Link
from .._plan.greedy import decide, fitting
from .._plan.plan import Measured, Plan
from .._plan.prefix import prefix
from .._plan.replan import Shown, pace
from .._record.record import DERIVED, Record
from .._torch.private import recomputes, transforming
from .._transfer.cost import Cost
from .._transfer.daily_allowance import Allowance
from .acted import Acted
from .course import Entry
from .joint import ALONE, LOOKING, SURVEYING, TIMING, TRYING, Joint
from .kind import Kind
from .kinds import Kinds
from .pace import Pace
from .write_cap import write_cap

_MOST_WATCHED = 1 << 16  # storages or blocks, after which forwards without a backward begin to be watched anew
_MOST_DEPARTURES = 3  # of steps called alike, which then are not watched any more: each watch runs every block again
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


class Planner:
    """Observes, plans, and answers for each record whether it goes.

    Attributes:
        plan: the last that was made.
        kind: of the step under way.
        kinds: all that have been seen.
        followed: the plan of the last step, as it is since; None if that went by none.
        follows: the step under way does what one before did, and only what is to go has records.
        put_aside: numbers of records that a trial was the first to save; autograd may do so later.

    Args:
        ledger: knows the bytes that saved tensors may hold, and do.
        cost: of the transfers of the step under way.
        allowance: of bytes to be written in a day.
        in_flight_bytes: most bytes on their way out at once.
        lossy: whether a codec changes values. Blocks then never recompute: what they save in backward no codec sees.
        keep, give: the engine's hooks.
    """

    def __init__(
        self,
        config: OffloadConfig,
        model: Callable[[], nn.Module | None],
        *,
        lock: threading.RLock,
        ledger: Ledger,
        cost: Cost,
        allowance: Allowance,
        in_flight_bytes: int,
        lossy: bool,
        keep: Callable[[Tensor], Any],
        give: Callable[[Any], Tensor],
    ) -> None:
        self.plan: Plan | None = None
        self.followed: Plan | None = None
        self.put_aside: set[int] = set()
        self._model, self._lock = model, lock
        self._keep, self._give = keep, give
        self._ledger, self._cost, self._allowance = ledger, cost, allowance
        self._least_bytes = int(config.min_tensor_bytes)
        self._strict = config.memory_budget is not None  # a step that exceeds a user's own budget must not begin
        self._by_rule = config.policy == "tba"
        self._compresses, self._lossy = config.compress is not None, lossy
        self._may_derive = config.derive and not (self._compresses or self._by_rule)
        named = find.named(model(), config.blocks) if config.blocks is not None else ()
        self._named = [weakref.ref(module) for module in named]  # by the user, who hears of a wrong name now
        self._forwards = Forwards()
        self.kinds = Kinds()
        self.kind = self.kinds.unseen
        self.follows = False
        self._spoilt = False  # the step under way tells nothing
        self._now: Watch | None = None
        self._thread = _Thread()
        self._capacity_bytes: int | None = None
        self._steps = 0  # ended so far
        self._pace = Pace(config, cost, in_flight_bytes)
        alone = self._by_rule or lossy or not config.rank_timeout
        self._joint = None if alone else Joint(type(model()).__name__, config.rank_timeout)

    @property
    def acts(self) -> bool:
        """Whether a plan moves or recomputes anything of the step under way, which may not fit without it."""
        return self.kind.plan is not None and not self.kind.plan.idle

    @property
    def agreement_s(self) -> float:
        """Seconds that agreeing with other ranks has taken."""
        return 0.0 if self._joint is None else self._joint.agreement_s

    @property
    def derives(self) -> bool:
        """Whether something of the step under way is derived by plan, or tried to be."""
        kind = self.kind
        return self._may_derive and (kind.blocks if kind.plan is None else bool(kind.plan.derived))

    @property
    def acted(self) -> Acted:
        """What has been done to the step under way, which is to end."""
        plan, seen = self.kind.plan, self._now
        return Acted(
            planned=self.acts,
            recomputed=plan is not None and bool(plan.recomputed),
            tried=seen is not None and bool(seen.trials),
        )

    @property
    def repeats(self) -> bool:
        """Whether the step under way is to do what others of its kind do, so that one can be written down for all."""
        return self.kind.plan is not None and not self._compresses

    def follow(self) -> None:
        """Have the step under way do what one before did."""
        self.follows = True
        self._seen().followed = True  # its time begins now

    def depart(self, departs: bool) -> None:
        """Note that the step under way cannot be followed any more; if it `departs`, that it is another one."""
        self.follows, self._seen().departed = False, True
        self._spoilt = self._spoilt or not departs

    # -- around the model's forward --------------------------------------------------------------------------------

    def meet(self, key: Hashable) -> bool:
        """Meet the other ranks of the job before a forward, where they are to; whether that has to be seen.

        It may wait for them, without the lock.
        """
        joint = self._joint
        if joint is None or joint.phase is ALONE:
            return False
        with self._lock:
            kind = self.kinds.of(key)
        new = None
        if joint.begin_forward():
            new = joint.meet(kind.says(repr(key), joint.phase, self._model(), amid=self._now is not None))
        with self._lock:
            if isinstance(new, Decision):
                self._bind(kind, new)
            elif new is SURVEYING:
                kind.survey()
                self._candidates(kind)
            elif new in (LOOKING, ALONE):
                self._end_trials()
            together = kind.decision is not None and bool(kind.decision.joint)
            which = repr((key, kind.decision and sorted(kind.decision.recomputed)))
        stands = joint.carry_out(which if together else None)
        with self._lock:
            if not stands:
                self._fall_back(self.kinds if joint.phase is ALONE else (kind,))
            if self._now is not None and (new is not None or not stands):
                self._spoilt = True  # in the midst of a step of several forwards
            planned = kind.decision is not None and kind.plan is not None and not kind.plan.idle
        return joint.phase in (SURVEYING, TRYING, TIMING) or planned

    def _bind(self, kind: Kind, decision: Decision) -> None:
        """Have a kind of step recompute what all ranks do."""
        self._set(kind, kind.bind(decision))

    def _end_trials(self) -> None:
        """Go back to what was decided before a trial that ranks have not brought to an end."""
        for kind in self.kinds:
            if (decision := kind.decision) is not None and decision.against is not None:
                self._bind(kind, decision.against)

    def leave(self) -> None:
        """Have the other ranks wait for this one no more."""
        if self._joint is not None:
            self._joint.leave()
            self._fall_back(self.kinds)

    def _fall_back(self, kinds: Iterable[Kind]) -> None:
        """Follow no plan any more that ranks have agreed on."""
        for kind in kinds:
            if kind.decision is not None:
                kind.end_plan()
                kind.wants = True

    def begin_forward(self, key: Hashable, capacity_bytes: int | None) -> None:
        """Begin a forward of the model, given what `key` describes; stand around its blocks. Raises BudgetError.

        `capacity_bytes`: that the store may hold; None for no limit, or no store yet.
        """
        self._capacity_bytes = capacity_bytes
        kind = self.kinds.call(key)
        seen = self._now
        if seen is not None and max(len(seen.saved), len(seen.visits)) > _MOST_WATCHED:
            self._now = None
        if (self._strict or self._by_rule) and not kind.watched:
            self._candidates(kind)
        if self._strict and kind.plan is not None and not kind.plan.fits:
            facts = replace(kind.plan.facts, cap=self._cap(kind.plan.facts))
            # The disk and the day may have room again.
            plan = self._decide(facts, self._ledger.look_at_room(), kind.plan)
            self._set(kind, replace(plan, reason="the one before did not fit"))
            if not plan.fits:
                raise BudgetError(plan.shortfall())
        self._begin(kind)
        self._thread.block = OUTSIDE
        modules = kind.around()
        if modules and not torch.compiler.is_compiling():
            self._forwards.put(modules, self._run if kind.blocks else self._survey)

    def _begin(self, kind: Kind) -> None:
        """Take the step under way for one of this kind, from here on."""
        self.kind = kind
        self._ledger.expect(kind.expected(tries=not self._lossy))

    def end_forward(self) -> None:
        """End it."""
        self._forwards.remove()
        self._thread.block = OUTSIDE
        if self._joint is not None:
            self._joint.end_forward()

    def go_on_in_child(self, lock: threading.RLock) -> None:
        """In a forked child: a forward that is under way goes on, with the engine's new lock."""
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

    def joined(self, record: Record) -> None:
        """Note that a record is saved once more."""
        if record.number in self.put_aside:
            if self.saved(record):
                record.go()
        elif self._now is not None and not (self._thread.aside or self._now.turned):
            if self.kind.plan is None:
                self._now.again(self._thread.block, record.number, self._thread.at_hand, record.root())
            else:
                self._now.saved_elsewhere.add(self._thread.block)

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

    # -- between steps -----------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Begin the step under way anew: nothing is left of what it has saved."""
        self._now, self.follows, self._spoilt = None, False, False
        self.put_aside.clear()
        self._ledger.forget_replays()

    def end_step(
        self,
        *,
        whole: bool,
        course: list[Entry] | None,
        sent_bytes: int,
        on_device: bool,
        capacity_bytes: int | None,
    ) -> None:
        """End a step. If all of it was seen, learn from it, and plan the next of its kind.

        Args:
            whole: all of it was seen.
            course: what it was, if that was written down.
            sent_bytes: by the engine, in this step.
            on_device: whether what moves comes from a device.
            capacity_bytes: as in `begin_forward`.
        """
        self._capacity_bytes = capacity_bytes
        self._steps += 1
        seen, whole = self._now, whole and not self._spoilt
        kind, plan = self.kind, self.kind.plan
        self.forget()
        if whole and seen is not None and seen.turned:
            self._learn(kind, seen, sent_bytes, on_device)
            if course is not None and plan is not None and kind.plan is not None and kind.plan.decides_as(plan):
                kind.course = course
        self.followed = kind.plan if plan is not None else None
        self._begin(self.kinds.unseen)  # until a forward tells of which kind the next is

    def _learn(self, kind: Kind, seen: Watch, sent_bytes: int, on_device: bool) -> None:
        budget_bytes = self._ledger.look_at_room()
        link = self._pace.learn(planned=self.plan is not None, on_device=on_device)
        kind.watched = True
        phase = LOOKING if self._joint is None else self._joint.phase
        if kind.plan is not None:
            self._follow(kind, seen, link, budget_bytes)
        elif phase is SURVEYING and not kind.blocks:
            self._choose(kind, seen)
        elif phase is TRYING:
            joint = frozenset(visit for visit, trial in seen.trials.items() if trial.joint)
            kind.share = Share(self._facts(kind, seen, link), budget_bytes, joint)
        elif kind.departures >= _MOST_DEPARTURES:
            kind.modules.clear()
        elif seen.held_bytes > budget_bytes or sent_bytes or self._by_rule:
            kind.wants = True
            self._advance(kind, seen, link, budget_bytes)
        else:
            kind.modules.clear()

    def _advance(self, kind: Kind, seen: Watch, link: Link, budget_bytes: int) -> None:
        surveyed = bool(kind.modules)
        if kind.blocks or not (kind.modules or self._candidates(kind)):
            facts = self._facts(kind, seen, link)
            reason = "the step saved other tensors than planned" if kind.departures else ""
            self._set(kind, replace(self._decide(facts, budget_bytes), reason=reason))
        elif surveyed:
            self._choose(kind, seen)

    def _choose(self, kind: Kind, seen: Watch) -> None:
        """Choose a kind's blocks by what modules have saved; none is seen inside compiled code: then there are none."""
        chosen = list(seen.inside) if self._named else find.blocks(seen.inside)
        alone = self._joint is None or self._joint.phase is not SURVEYING
        whole = self._named or self._by_rule or self._lossy or not alone
        parts = [] if whole else find.parts(chosen, seen.inside)
        kind.modules, kind.blocks = [weakref.ref(module) for module in (*chosen, *parts)], True
        kind.parts = set(map(weakref.ref, parts))
        kind.block_bytes = max((seen.inside.get(module, 0) for module in chosen), default=0)

    def _facts(self, kind: Kind, seen: Watch, link: Link) -> Facts:
        """Conclude the facts of a step, by which the next of its kind are planned."""
        seen.take_times_of_device()
        facts = seen.facts(link, self._ledger.read_ahead_bytes)
        kind.places = Places(shared=seen.shared)
        kind.visits = [*(module for module, _, _ in seen.visits), *(part.module for part in seen.parts)]
        return replace(facts, cap=self._cap(facts))

    def _candidates(self, kind: Kind) -> bool:
        model = self._model()
        found: Iterable[nn.Module] = find.candidates(model) if model is not None else ()
        kind.modules = self._named.copy() or [weakref.ref(module) for module in found]
        return bool(kind.modules)

    def _follow(self, kind: Kind, seen: Watch, link: Link, budget_bytes: int) -> None:
        """Compare a planned step with its plan, which is made anew if too much has changed."""
        plan = kind.plan
        assert plan is not None
        if seen.departed:
            kind.wants = kind.wants or kind.decision is not None
            kind.end_plan()
            kind.departures += 1
            return
        kind.departures = 0
        if left := seen.inputs_left(plan.inputs):
            facts = plan.facts.keeping_inputs(left)
            reason = f"the inputs of {len(left)} blocks stay"
            self._set(kind, replace(self._decide(facts, budget_bytes, plan), reason=reason))
            return
        step_s, lost_s, waited_s = seen.step_s, self._pace.lost_s(seen), self._cost.waited_s
        line, timed = seen.timeline, True
        if line is not None:
            before_s = plan.facts.step_s + plan.predicted.replayed_s + plan.derived_s
            before_s = before_s if plan.measured is None else plan.measured.step_s
            found = line.step()
            timed = found is not None  # the device may not be so far
            step_s, lost_s = found or (before_s, 0.0)
            waited_s = lost_s  # not the host's, which waits for a device that it is ahead of
        waits_otherwise = timed and kind.compare(waited_s)
        facts = plan.facts.holding(seen.held_by_place())
        pace_now = pace(plan, step_s, lost_s, replays=line is None)
        shown = Shown(
            facts=replace(facts, cap=self._cap(facts), link=link.slowed(kind.slower)),
            budget_bytes=budget_bytes,
            measured=Measured(step_s, self._ledger.watched_peak_bytes, plan.facts.step_s * pace_now),
            pace=pace_now,
            replays=line is None,
            waited_s=waited_s if waits_otherwise else None,
        )
        new = kind.follow_up(shown, self._decide, timed=timed)
        self._set(kind, new)
        if (share := kind.share) is not None:
            # Slower computation may be time spent waiting for other ranks, which another plan would avoid: the pace
            # stays as it was first seen.
            facts = replace(share.facts, link=new.facts.link, cap=new.facts.cap)
            kind.share = replace(share, facts=facts, budget_bytes=budget_bytes)

    def _decide(self, facts: Facts, budget_bytes: int, before: Plan | None = None) -> Plan:
        """Decide on a step; in the way that the plan before was made, which may have won a contest, if that fits."""
        if self._by_rule:
            return prefix(facts, budget_bytes)
        if before is not None and before.decide is not None:
            if before.agreed:  # other ranks recompute the same
                return replace(fitting(before.decide, facts, budget_bytes), agreed=before.agreed, tried=before.tried)
            if (plan := before.decide(facts, budget_bytes)).fits:
                return plan
        return fitting(decide, facts, budget_bytes)

    def _set(self, kind: Kind, plan: Plan) -> None:
        if kind.plan is None or not plan.decides_as(kind.plan):
            # The new plan allocates differently: what this step's has left free would stay beside it.
            release()
            kind.course = None
        if plan.reason and not plan.made_in:
            plan = replace(plan, made_in=self._steps)
        kind.plan = self.plan = plan
        nbytes = {each.place: each.replayed_bytes for each in plan.facts.saved}
        kind.places = replace(kind.places, nbytes=nbytes, recomputed=plan.recomputed, inputs=plan.inputs)

    def _cap(self, facts: Facts) -> Cap | None:
        return write_cap(self._capacity_bytes, self._allowance, len(facts.saved))

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
        within, thread.aside = thread.aside, True
        try:
            yield
        finally:
            thread.aside = within
            with self._lock:
                seen.aside_s += self._pace.at(seen) - since_s
                if seen.timeline is not None:
                    seen.timeline.step_back(begun)
