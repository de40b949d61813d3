"""A plan that is tried against another: what comes of it where something else changes meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.plans import MIB, layers
from tba._auto.kind import Kind
from tba._plan.contest import Contest, rival
from tba._plan.facts import Facts
from tba._plan.greedy import decide
from tba._plan.plan import Measured, Plan
from tba._plan.replan import Shown

FACTS, BUDGET = layers(12, 8, replay_s=0.02), 48 * MIB
PLAN = decide(FACTS, BUDGET)


def on_trial() -> tuple[Kind, Plan]:
    tried = rival(PLAN)
    assert tried is not None
    assert tried.recomputed != PLAN.recomputed
    return Kind(plan=tried, contest=Contest(stood=PLAN, stood_s=PLAN.predicted.step_s)), tried


def after(kind: Kind, budget_bytes: int, pace: float = 1.0) -> Plan:
    def decided(facts: Facts, budget_bytes: int, before: Plan) -> Plan:
        assert before.decides_as(PLAN)
        return decide(facts, budget_bytes)

    shown = Shown(facts=FACTS, budget_bytes=budget_bytes, measured=Measured(1.0, 0), pace=pace)
    return kind.follow_up(shown, decided, timed=True)


@pytest.mark.parametrize("pace", [1.0, 1.5])
def test_where_nothing_else_changes_the_trial_goes_on(pace: float) -> None:
    kind, tried = on_trial()
    assert after(kind, BUDGET, pace) == replace(tried, measured=Measured(1.0, 0))


def test_where_the_budget_shrinks_the_trial_ends_and_what_follows_fits() -> None:
    kind, tried = on_trial()
    smaller = int(0.85 * BUDGET)
    found = after(kind, smaller)
    assert found.fits
    assert (found.budget_bytes, found.predicted.peak.nbytes <= smaller) == (smaller, True)
    assert not found.decides_as(tried)


def test_a_trial_has_ended_too_where_the_new_plan_is_the_one_that_was_tried() -> None:
    kind, tried = on_trial()
    shown = Shown(facts=FACTS, budget_bytes=int(0.85 * BUDGET), measured=Measured(1.0, 0))
    found = kind.follow_up(shown, lambda facts, budget_bytes, before: tried.under(facts, budget_bytes), timed=True)
    assert found.decides_as(tried)
    assert not kind.contest.tries
    assert kind.contests == 2
