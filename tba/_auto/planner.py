"""Planner: learns from the steps of tier "auto", and plans those that memory has no room for.

Steps of one kind give the model tensors of equal shapes. Of each kind, a first step that does not fit tells which
modules are the model's blocks; the next when each storage is saved and wanted, what the link carries, and which blocks
may recompute; the third is planned. Until then, and from where a step departs from what was seen, the rule of
`WriteBehind` alone holds: over budget, the oldest goes first. It stays beneath every plan. A storage counts with the
bytes that a codec leaves of it, which are what is kept and what moves.

`Execution` carries the plans out, and notes what each step shows.

`meet` runs without the engine's lock, and takes it for what it notes; all else wants it held, but `end_forward`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .._blocks import find
from .._blocks.watch import Places, Watch
from .._config import OffloadConfig
from .._errors import BudgetError
from .._group.decision import Decision, Share
from .._memory.allocator import release
from .._memory.ledger import Ledger
from .._plan.facts import Cap, Facts, Link
from .._plan.greedy import decide, fitting
from .._plan.plan import Measured, Plan
from .._plan.prefix import prefix
from .._plan.replan import Shown, paces
from .._transfer.cost import Cost
from .._transfer.daily_allowance import Allowance
from .course import Entry
from .execution import Execution
from .joint import ALONE, LOOKING, SURVEYING, TIMING, TRYING, Joint
from .kind import Kind
from .kinds import Kinds
from .pace import Pace, without_hooks
from .write_cap import write_cap

_MOST_DEPARTURES = 3  # of steps called alike, which then are not watched any more: each watch runs every block again


class Planner:
    """Learns from steps, and makes plans.

    Attributes:
        plan: the last that was made.
        kinds: of steps, all that have been seen.
        followed: the plan of the last step, as it is since; None if that went by none.
        execution: of the step under way.

    Args:
        ledger: knows the bytes that saved tensors may hold, and do.
        cost: of the transfers of the step under way.
        allowance: of bytes to be written in a day.
        in_flight_bytes: most bytes on their way out at once.
        lossy, keep, give: for `Execution`.
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
        self.kinds = Kinds()
        self._model, self._lock = model, lock
        self._ledger, self._cost, self._allowance = ledger, cost, allowance
        self._strict = config.memory_budget is not None  # a step that exceeds a user's own budget must not begin
        self._by_rule, self._lossy = config.policy == "tba", lossy
        named = find.named(model(), config.blocks) if config.blocks is not None else ()
        self._named = [weakref.ref(module) for module in named]  # by the user, who hears of a wrong name now
        self._capacity_bytes: int | None = None
        self._steps = 0  # ended so far
        self._pace = Pace(config, cost, in_flight_bytes)
        alone = self._by_rule or lossy or not config.rank_timeout
        self._joint = None if alone else Joint(type(model()).__name__, config.rank_timeout)
        self.execution = Execution(
            config,
            model,
            self.kinds.unseen,
            lock=lock,
            ledger=ledger,
            cost=cost,
            pace=self._pace,
            joint=self._joint,
            lossy=lossy,
            keep=keep,
            give=give,
        )

    @property
    def agreement_s(self) -> float:
        """Seconds that agreeing with other ranks has taken."""
        return 0.0 if self._joint is None else self._joint.agreement_s

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
            new = joint.meet(kind.says(repr(key), joint.phase, self._model(), amid=self.execution.under_way))
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
            if self.execution.under_way and (new is not None or not stands):
                self.execution.spoil()  # in the midst of a step of several forwards
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
        """Begin a forward of the model, given what `key` describes. Raises BudgetError.

        `capacity_bytes`: that the store may hold; None for no limit, or no store yet.
        """
        self._capacity_bytes = capacity_bytes
        kind = self.kinds.call(key)
        if (self._strict or self._by_rule) and not kind.watched:
            self._candidates(kind)
        if self._strict and kind.plan is not None and not kind.plan.fits:
            facts = replace(kind.plan.facts, cap=self._cap(kind.plan.facts))
            # The disk and the day may have room again.
            plan = self._decide(facts, self._ledger.look_at_room(), kind.plan)
            self._set(kind, replace(plan, reason="the one before did not fit"))
            if not plan.fits:
                raise BudgetError(plan.shortfall())
        self.execution.begin_forward(kind)

    def end_forward(self) -> None:
        """End it."""
        self.execution.end_forward()
        if self._joint is not None:
            self._joint.end_forward()

    def go_on_in_child(self, lock: threading.RLock) -> None:
        """In a forked child: a forward that is under way goes on, with the engine's new lock."""
        self._lock, self._joint = lock, None
        self.execution.go_on_in_child(lock)

    # -- between steps -----------------------------------------------------------------------------------------------

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
        execution = self.execution
        kind, plan = execution.kind, execution.kind.plan
        seen = execution.end()
        if whole and seen is not None and seen.turned:
            self._learn(kind, seen, sent_bytes, on_device)
            if course is not None and plan is not None and kind.plan is not None and kind.plan.decides_as(plan):
                kind.course = course
        self.followed = kind.plan if plan is not None else None
        execution.take_for(self.kinds.unseen)  # until a forward tells of which kind the next is

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
        facts = without_hooks(seen.facts(link, self._ledger.read_ahead_bytes), self._cost.hooks_s)
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
        step_s, waited_s = seen.step_s, self._cost.waited_s
        lost_s = self._pace.lost_s(seen) + self._cost.hooks_s
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
        pace_now, replay_pace = paces(plan, step_s, lost_s, seen.replayed_s if line is None else None)
        shown = Shown(
            facts=replace(facts, cap=self._cap(facts), link=link.slowed(kind.slower)),
            budget_bytes=budget_bytes,
            measured=Measured(step_s, self._ledger.watched_peak_bytes, plan.facts.step_s * pace_now),
            pace=pace_now,
            replay_pace=replay_pace,
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
