"""Replan: whether what a step has shown asks for another plan, and why. Pure: a plan and figures in, a plan out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .._text import size
from .facts import Facts
from .plan import Decided, Measured, Plan

_SURPRISE = 1.25  # a link this many times faster or slower than the plan was made for: it is made anew
_DRIFT = 1.1  # and one from which on it is simulated anew, as it stands
_OTHER_PACE = 0.1  # share by which the computation is slower or faster than it was
_OTHER_BUDGET = 0.1  # share by which the budget has changed since
_OTHER_BYTES = 0.05  # share by which what codecs leave of the step has changed since
_OTHER_CAP = 1.5  # times as many bytes that may move as before
_WORTH = 1.02  # times as long as a new plan, below which the one that stands stays: a change costs a step
_MOST_STOOD = 6  # another pace is asked about after 64 steps of it at the latest
_FORGET = 0.5  # weight of the last step in what is known of the pace: others may have run beside it


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a step that was carried out by a plan has shown.

    Attributes:
        facts: the plan's, with the link, the cap and the bytes that codecs leave as they are now.
        budget_bytes: as it is now.
        measured: what the step took.
        pace: times as long as the plan's facts say, its computation took.
        replay_pace: times as long as they say, blocks ran again.
        waited_s: that steps wait for transfers, if several in a row did not wait as predicted; else None.
    """

    facts: Facts
    budget_bytes: int
    measured: Measured
    pace: float = 1.0
    replay_pace: float = 1.0
    waited_s: float | None = None


def paces(plan: Plan, step_s: float, lost_s: float, replayed_s: float | None) -> tuple[float, float]:
    """Return how many times as long as predicted a step computed, and its blocks ran again.

    `lost_s` were not computation, and blocks ran again for `replayed_s`. That is None on a device: second runs were
    timed on it when the plan was made, and take that long whatever the host does.
    """
    predicted_s = plan.predicted.replayed_s
    expected_s = plan.facts.step_s + plan.derived_s
    computed_s = step_s - lost_s - (predicted_s if replayed_s is None else replayed_s)
    pace = computed_s / expected_s if computed_s > 0 and expected_s > 0 else 1.0
    if replayed_s is None:
        return pace, 1.0
    return pace, replayed_s / predicted_s if predicted_s and replayed_s else pace


def reason_to_replan(plan: Plan, shown: Shown) -> str | None:
    """Return why a plan is to be made anew after a step, in words; None if it stands."""
    made, now, predicted = _decided(plan), shown.facts, plan.predicted
    before = made.facts
    if shown.waited_s is not None:
        return f"steps wait {shown.waited_s:.3f} s for the link, not {predicted.waited_s:.3f} s"
    if now.link.times(before.link) > _SURPRISE:
        name, ratio = now.link.change(before.link)
        return f"the {name} carries {ratio:.2g} times what it did"
    if abs(shown.budget_bytes / max(1, made.budget_bytes) - 1) > _OTHER_BUDGET:
        return f"saved tensors may hold {size(shown.budget_bytes)}, not {size(made.budget_bytes)}"
    if abs(now.saved_bytes / max(1, before.saved_bytes) - 1) > _OTHER_BYTES:
        return f"codecs leave {size(now.saved_bytes)} of a step, not {size(before.saved_bytes)}"
    most_bytes = now.most_moved_bytes
    if predicted.moved_bytes > most_bytes or most_bytes > _OTHER_CAP * before.most_moved_bytes:
        return f"a step may write {size(most_bytes)}, not {size(before.most_moved_bytes)}"
    if abs(_pace_since(plan, shown) - 1) > _OTHER_PACE:
        return _other_pace(plan, shown)
    again = _replays_since(plan, shown)
    return f"blocks take {again:.2g} times as long to run again" if abs(again - 1) > _OTHER_PACE else None


def stands(plan: Plan, shown: Shown) -> bool:
    """Whether a plan that is only tried may be tried further: what steps of its kind take says nothing against it."""
    return _of_the_pace(plan, replace(shown, waited_s=None))


def follow_up(plan: Plan, shown: Shown, decide: Callable[[Facts, int], Plan]) -> Plan:
    """Return the plan for the next steps: the same, simulated anew if the link has drifted, or one that `decide` makes.

    A new one says why it was made (`Plan.reason`). It takes the place of one that fits only if it is faster by more
    than the step that a change costs.

    To decide takes dozens of simulated steps, and where other programs run the pace of the computation changes in every
    other step. So nothing is decided where no plan could be faster, by the lower bound. And each time that a plan turns
    out to stand at another pace, the pace has to be another one in twice as many steps before that is asked again.
    """
    measured, link = replace(plan, measured=shown.measured), shown.facts.link
    reason, slower = reason_to_replan(plan, shown), link.times(plan.facts.link) > _DRIFT
    drifts = slower or max(abs(shown.pace - 1), abs(_replays_since(plan, shown) - 1)) > _OTHER_PACE
    if reason is None and not drifts:
        return measured
    made, by_pace = _decided(plan), reason is not None and _of_the_pace(plan, shown)
    if by_pace:
        made = replace(made, steps=made.steps + 1)
    waits = by_pace and made.steps < 2**made.stood
    if waits and not drifts:
        return replace(measured, decided=made)
    weight = _weight(plan)
    facts = shown.facts.scaled(shown.pace**weight, shown.replay_pace**weight)
    still = replace(measured.under(facts, shown.budget_bytes), decided=made)
    if reason is None or waits:
        if still.fits:
            return still
        name, ratio = link.change(plan.facts.link)
        why = f"with a {name} that carries {ratio:.2g} times what it did" if slower else _other_pace(plan, shown)
        reason = f"{why}, it no longer fits"
    stood = made.stood if by_pace else 0
    if still.fits and still.predicted.step_s <= _WORTH * still.bound_s:
        return replace(still, decided=Decided(facts, shown.budget_bytes, stood))  # as good as decided
    new = decide(facts, shown.budget_bytes)
    if still.fits and (not new.fits or still.predicted.step_s <= _WORTH * new.predicted.step_s):
        return replace(still, decided=Decided(facts, shown.budget_bytes, min(stood + by_pace, _MOST_STOOD)))
    return replace(new, reason=reason)


def _decided(plan: Plan) -> Decided:
    return plan.decided or Decided(plan.facts, plan.budget_bytes)


def _weight(plan: Plan) -> float:
    return _FORGET if plan.measured is not None else 1.0  # what the watched steps told was of other steps


def _pace_since(plan: Plan, shown: Shown) -> float:
    """Return how many times as long as when the plan was decided on the computation takes now."""
    before_s = _decided(plan).facts.step_s
    return shown.pace ** _weight(plan) * plan.facts.step_s / before_s if before_s else 1.0


def _replays_since(plan: Plan, shown: Shown) -> float:
    """Return how many times as long as when the plan was decided on its blocks take to run again."""
    before_s, now_s = (
        sum(facts.blocks[number].replay_s or 0.0 for number in plan.recomputed)
        for facts in (_decided(plan).facts, plan.facts)
    )
    return shown.replay_pace ** _weight(plan) * now_s / before_s if before_s else 1.0


def _other_pace(plan: Plan, shown: Shown) -> str:
    return f"computation takes {_pace_since(plan, shown):.2g} times as long"


def _of_the_pace(plan: Plan, shown: Shown) -> bool:
    """Whether nothing but the pace of the computation asks for another plan."""
    as_decided = replace(plan, facts=_decided(plan).facts)
    return reason_to_replan(as_decided, replace(shown, pace=1.0, replay_pace=1.0)) is None
