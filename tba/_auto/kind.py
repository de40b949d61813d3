"""Kind: what is known of the steps in which the model is called alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from .._blocks.watch import Places
from .._group.decision import Decision, Share
from .._memory.ledger import Expected
from .._plan.contest import STEPS, WARM_UP, Contest
from .._plan.facts import Facts
from .._plan.greedy import decide_moves, fitting
from .._plan.plan import Plan
from .._plan.replan import Shown, follow_up, stands
from .course import Entry
from .joint import SURVEYING, TIMING, TRYING, Phase, Said

_MOST_CONTESTS = 3  # each has steps by a plan that may be slower
_OFF = 0.05  # share of a step by which it waits longer, or less, than its plan foresees, where more than chance does it
_TIMES = 2  # such steps in a row: in one of them others may have used the disk


@dataclass
class Kind:
    """What is known of one kind of step.

    Attributes:
        modules: those whose forward may be replaced while the model's next forward runs.
        blocks: whether those are its blocks, and not only what may be.
        parts: of the modules, those that run again within blocks alone.
        block_bytes: the most that one of them saves.
        watched: a step of it has been seen.
        departures: steps that were not what the ones before it had been.
        visits: the module of each block and part, as a plan's facts number them.
        places: where it saves what, by its plan.
        course: what a step by its plan was, if one has been written down.
        contest: of its plan and another.
        contests: how many there have been.
        wants: it did not fit, so that a plan is wanted that all ranks agree on.
        share: what this rank tells the others about it: the step as first seen, with the link and budget of now.
        decision: which blocks all ranks recompute, by their agreement; None without one.
        seconds: that the first steps by the plan took.
        slower: times slower than it carries that the link counts as, since more is waited for it than plans foresee.
    """

    modules: list[weakref.ref[nn.Module]] = field(default_factory=list)
    blocks: bool = False
    parts: set[weakref.ref[nn.Module]] = field(default_factory=set)
    block_bytes: int = 0
    watched: bool = False
    departures: int = 0
    visits: list[weakref.ref[nn.Module]] = field(default_factory=list)
    plan: Plan | None = None
    places: Places = field(default_factory=Places)
    course: list[Entry] | None = None
    contest: Contest = field(default_factory=Contest)
    contests: int = 1
    wants: bool = False
    share: Share | None = None
    decision: Decision | None = None
    seconds: tuple[float, ...] = ()
    slower: float = 1.0
    _off_steps: int = 0

    def around(self) -> list[nn.Module]:
        """List those whose forward is replaced in the next one: with a plan, no parts but what recomputes."""
        left: set[weakref.ref[nn.Module]] = set()
        if (plan := self.plan) is not None:
            left = self.parts.difference(self.visits[number] for number in plan.recomputed)
        return [module for each in self.modules if each not in left and (module := each()) is not None]

    def end_plan(self) -> None:
        """Have no plan any more: its steps are watched anew."""
        self.plan, self.places, self.course = None, Places(), None
        self.share = self.decision = None
        self.seconds = ()
        self.contest = Contest(over=self.contest.over)

    def bind(self, decision: Decision) -> Plan:
        """Adopt the ranks' decision; return the plan for it. If the same blocks recompute, the same moves stay."""
        plan, share, before = self.plan, self.share, self.decision
        assert share is not None
        if plan is None or before is None or plan.recomputed != decision.recomputed:
            moves = partial(decide_moves, recomputed=decision.recomputed)
            plan = fitting(moves, share.facts, share.budget_bytes)
        self.wants, self.decision, self.seconds = False, decision, ()
        self.contest = Contest(over=True)  # a rival would recompute other blocks
        return replace(plan, agreed=decision.told, tried=decision.tried)

    def survey(self) -> None:
        """Have its blocks found anew."""
        self.end_plan()
        self.blocks = False

    def says(self, name: str, phase: Phase, model: nn.Module | None, *, amid: bool) -> Said:
        """Tell what this rank says of it where ranks meet; `amid` a step of several forwards."""
        step_s = self.fastest_s if phase is TIMING else None
        tells = step_s is not None or (phase is TRYING and self.decision is None)
        share = self.share if tells else None  # it is large
        blocks = self._paths(model) if phase is SURVEYING else None
        return Said(name, self.wants, blocks, share, self.decision, step_s, amid)

    def _paths(self, model: nn.Module | None) -> tuple[str, ...] | None:
        """Name the blocks that ranks are to try together; None if this one has not found them yet."""
        if not self.blocks or model is None:
            return None
        blocks = {module for reference in self.modules if (module := reference()) is not None}
        return tuple(path for path, module in model.named_modules() if module in blocks)

    def time(self, step_s: float) -> None:
        """Note what a step by the plan took."""
        if len(self.seconds) < STEPS:
            self.seconds = (*self.seconds, step_s)

    @property
    def fastest_s(self) -> float | None:
        """Seconds of the fastest of the first steps by the plan, not counting the very first; None until they ran."""
        return min(self.seconds[WARM_UP:]) if len(self.seconds) == STEPS else None

    def follow_up(self, shown: Shown, decide: Callable[[Facts, int, Plan], Plan], *, timed: bool) -> Plan:
        """Return the plan for the next steps after one that has `shown` this; `timed`: its duration is known.

        This is the same plan, a rival to be tried against it, or a new one by `decide`, which is given the one before.
        """
        plan = self.plan
        assert plan is not None
        goes_on = self.contest.tries and stands(plan, shown)
        new = replace(plan, measured=shown.measured) if goes_on else self._replan(plan, shown, decide)
        if not goes_on and (self.contest.tries or not new.decides_as(plan)):
            self.contest = Contest(over=bool(plan.agreed) or self.contests >= _MOST_CONTESTS)
            self.contests += 1
            self.seconds = ()
        elif timed:
            self.contest, new = self.contest.after(new, shown.measured.step_s)
            self.time(shown.measured.step_s)
        return new

    def _replan(self, plan: Plan, shown: Shown, decide: Callable[[Facts, int, Plan], Plan]) -> Plan:
        """Decide anew, if what a step has shown asks for that.

        Where something else changes while a rival is tried, what was timed tells nothing more: the plan that it was
        tried against is the one before, whose own steps have not shown this.
        """
        if (stood := self.contest.stood) is not None:
            plan, shown = stood, replace(shown, measured=stood.measured or shown.measured, waited_s=None)
        return follow_up(plan, shown, lambda facts, budget_bytes: decide(facts, budget_bytes, plan))

    def expected(self, *, tries: bool) -> Expected:
        """Tell what such a step needs; `tries`: without a plan, its blocks are tried."""
        plan = self.plan
        if plan is None:
            return Expected(trial_bytes=self.block_bytes if tries else 0)
        facts = plan.facts
        return Expected(
            sent_bytes=sum(plan.sends.values()),
            largest_bytes=facts.largest_bytes,
            replay_bytes=facts.replay_bytes(plan.recomputed),
            link_bytes_per_s=facts.link.write_bytes_per_s,
        )

    def compare(self, waited_s: float) -> bool:
        """Compare how long a step by plan has waited with what the plan foresees; whether `slower` has changed.

        A link may carry as fast as it was seen to, and bring late all the same: where memory at the budget leaves a
        read no room in time, or a rule beneath the plan sends what it would keep.
        """
        assert self.plan is not None
        found, link = self.plan.predicted, self.plan.facts.link
        carried_s = found.moved_bytes / link.write_bytes_per_s + found.read_bytes / link.read_bytes_per_s
        if (spill := link.spill) is not None:
            carried_s += found.spilled_bytes * (1 / spill.write_bytes_per_s + 1 / spill.read_bytes_per_s)
        late_s = waited_s - found.waited_s
        off = carried_s > 0 and abs(late_s) > _OFF * found.step_s
        self._off_steps = self._off_steps + 1 if off else 0
        if self._off_steps < _TIMES:
            return False
        before, self.slower = self.slower, max(1.0, self.slower * (1 + late_s / carried_s))
        self._off_steps = 0
        return self.slower != before
