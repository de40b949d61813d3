"""Paces: a plan simulated as slowly as a step has really computed, forward and backward each on its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tba._plan.facts import Facts
from tba._plan.plan import Plan

_ROUNDS = 16  # of the search for a pace, each of which halves what is left


def plan_at_pace(plan: Plan, turn_s: float, step_s: float) -> Plan:
    """Simulate a plan with each way's computation slower or faster, until both end when those of the step did."""
    forward = _search(
        lambda pace: plan.under(at_paces(plan.facts, pace, 1.0), plan.budget_bytes).predicted.turn_s, turn_s
    )

    def with_backward(pace: float) -> Plan:
        return plan.under(at_paces(plan.facts, forward, pace), plan.budget_bytes)

    return with_backward(_search(lambda pace: with_backward(pace).predicted.step_s, step_s))


def at_paces(facts: Facts, forward: float, backward: float) -> Facts:
    """Return the facts of a step whose forward and backward compute so many times as long."""
    out, back = facts.scaled(forward), facts.scaled(backward)
    saved = (
        replace(one, wanted_s=other.wanted_s, freed_s=other.freed_s)
        for one, other in zip(out.saved, back.saved, strict=True)
    )
    blocks = (replace(one, replay_s=other.replay_s) for one, other in zip(out.blocks, back.blocks, strict=True))
    return replace(out, saved=tuple(saved), blocks=tuple(blocks), backward_s=back.backward_s)


def _search(found_s: Callable[[float], float], wanted_s: float) -> float:
    """Find the pace at which something takes so many seconds."""
    slow, fast = 8.0, 1 / 8
    for _ in range(_ROUNDS):
        ratio: float = (slow * fast) ** 0.5
        slow, fast = (ratio, fast) if found_s(ratio) > wanted_s else (slow, ratio)
    return ratio
