"""Contest: a plan and its rival are carried out for a few steps each; the faster one stays. Pure.

The rival has to be faster twice: by a margin in its first few steps, and by any in the same number after those. Where
other programs run, three steps of one plan may well be faster than three of another by chance, and what that costs
would last.

A plan is chosen by a model of the step, which errs: what transfers take from the computation (cores, caches, memory
bandwidth) depends on what else runs. Where steps take longer than predicted by more than the model's usual error, and a
plan of the other kind, which moves nothing or recomputes nothing, is predicted to take hardly longer, a few steps of
each tell more than the model does. No rival is tried otherwise: a few steps tell two plans apart only if the plans
differ by more than the steps of one plan do.

Every plan gives the same bits and fits the budget, so a contest costs nothing but the time of the slower one's steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .greedy import decide
from .plan import Plan

WRONG = 1.1  # times as long as predicted, from which on the model is not trusted
STEPS, WARM_UP = 3, 1  # by each plan; the first steps after a change allocate anew
_FASTER = 0.97  # of the other's time, below which a rival is ahead
_NEAR = 1.2  # times as long as the plan that stands: a rival predicted to take longer is not tried


@dataclass(frozen=True)
class Contest:
    """How far a contest has come.

    Attributes:
        seconds: of the steps by the plan that is carried out now.
        stood: the plan that its rival is tried against; None while that is not tried yet.
        stood_s: seconds of its fastest step.
        ahead: the rival has been faster once.
        over: it is decided, or there is no rival.
    """

    seconds: tuple[float, ...] = ()
    stood: Plan | None = None
    stood_s: float = 0.0
    ahead: bool = False
    over: bool = False

    @property
    def tries(self) -> bool:
        """Whether the rival is carried out now."""
        return self.stood is not None

    def after(self, plan: Plan, step_s: float) -> tuple[Contest, Plan]:
        """Return the contest after a step by `plan`, which took so many seconds, and the plan of the next step."""
        if self.over:
            return self, plan
        seconds = (*self.seconds, step_s)
        if len(seconds) < STEPS:
            return replace(self, seconds=seconds), plan
        fastest_s = min(seconds[WARM_UP:])
        if self.stood is None:
            other = rival(plan) if fastest_s > WRONG * plan.predicted.step_s else None
            if other is None:
                return Contest(over=True), plan
            return Contest(stood=plan, stood_s=fastest_s), replace(other, tried=f"on trial, for {STEPS} steps")
        if not is_faster(fastest_s, self.stood_s, ahead=self.ahead):
            steps, times = STEPS * (1 + self.ahead), f"{fastest_s:.3f} s a step, not {self.stood_s:.3f} s"
            tried = f"tried for {steps} steps: {_instead(plan)} took {times}"
            return Contest(over=True), replace(self.stood, tried=tried)
        if not self.ahead:
            return replace(self, seconds=(), ahead=True), replace(plan, tried=f"on trial, for {STEPS} more steps")
        reason = f"a step takes {fastest_s:.3f} s, not {self.stood_s:.3f} s: {_instead(plan)}"
        return Contest(over=True), replace(plan, reason=reason, tried="")


def is_faster(step_s: float, stood_s: float, *, ahead: bool) -> bool:
    """Whether a rival is faster than the plan that stood: by a margin, and where it is `ahead` already by any."""
    return step_s < (stood_s if ahead else _FASTER * stood_s)


def rival(plan: Plan) -> Plan | None:
    """Return the plan of the other kind that is predicted to take least; None if it would take much longer."""
    facts, budget_bytes = plan.facts, plan.budget_bytes
    if plan.decide is None or plan.idle or not plan.fits:
        return None
    others = []
    if plan.sends:
        others.append(decide(facts, budget_bytes, moves=False))
    if plan.recomputed:
        others.append(decide(facts, budget_bytes, recomputes=False))
    near = [
        other
        for other in others
        if other.fits and not other.decides_as(plan) and other.predicted.step_s <= _NEAR * plan.predicted.step_s
    ]
    return min(near, key=lambda other: other.predicted.step_s, default=None)


def _instead(plan: Plan) -> str:
    if not plan.sends:
        return f"recomputing {plan.runs_again} and moving nothing"
    return "moving more" if plan.recomputed else "recomputing nothing"
