"""A contest of two plans: who is tried, for how long, and which stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.plans import MIB, layers
from tba._plan.contest import Contest, rival
from tba._plan.greedy import decide
from tba._plan.plan import Plan

FACTS, BUDGET = layers(12, 8, replay_s=0.02), 80 * MIB
PLAN = decide(FACTS, BUDGET)
SLOW_S = 1.2 * PLAN.predicted.step_s  # more than it should take


def carry_out(contest: Contest, plan: Plan, seconds: list[float]) -> tuple[Contest, Plan]:
    for step_s in seconds:
        contest, plan = contest.after(plan, step_s)
    return contest, plan


def test_a_plan_that_moves_has_a_rival_that_does_not() -> None:
    assert PLAN.sends
    other = rival(PLAN)
    assert other is not None
    assert other.fits
    assert not other.sends
    assert other.recomputed
    back = rival(other)
    assert back is not None
    assert (back.sends, back.recomputed) == (PLAN.sends, frozenset())


def test_there_is_none_where_nothing_else_fits_or_all_else_is_slow() -> None:
    assert rival(decide(FACTS, FACTS.saved_bytes * 2)) is None  # everything stays
    alone = replace(FACTS, blocks=tuple(replace(block, replay_s=None) for block in FACTS.blocks))
    assert rival(decide(alone, BUDGET)) is None
    slow = replace(FACTS, blocks=tuple(replace(block, replay_s=FACTS.step_s) for block in FACTS.blocks))
    assert rival(decide(slow, BUDGET)) is None
    assert rival(replace(PLAN, decide=None)) is None  # of a fixed rule


def tried_on(shares: list[float]) -> tuple[Contest, Plan, Plan]:
    """Have a rival take so many times as long in each three of its steps; return what came of it, and the rival."""
    contest, plan = carry_out(Contest(), PLAN, [9.0, SLOW_S])  # the first of three does not count
    assert plan is PLAN
    contest, tried = carry_out(contest, plan, [SLOW_S + 0.1])
    last = tried
    for share, more in zip(shares, ("", "more "), strict=False):
        assert contest.tries
        assert not last.sends
        assert f"on trial, for 3 {more}steps" in str(last)
        contest, last = carry_out(contest, last, [0.1, share * SLOW_S])
        assert contest.tries
        contest, last = carry_out(contest, last, [share * SLOW_S + 0.1])
    return contest, last, tried


def instead(rival: Plan) -> str:
    return f"recomputing {len(rival.recomputed)} blocks and moving nothing"


@pytest.mark.parametrize("second", [0.9, 0.99])
def test_a_rival_that_is_faster_twice_stays(second: float) -> None:
    contest, last, tried = tried_on([0.9, second])
    assert (contest.over, contest.tries, last.decides_as(tried)) == (True, False, True)
    assert f"a step takes {second * SLOW_S:.3f} s, not {SLOW_S:.3f} s: {instead(tried)}" in str(last)
    assert "on trial" not in str(last)
    assert carry_out(contest, last, [5.0, 0.1])[1] is last


@pytest.mark.parametrize("shares", [[0.98], [1.2], [0.9, 1.01]])
def test_one_that_is_slower_or_was_faster_once_by_chance_gives_way(shares: list[float]) -> None:
    contest, last, tried = tried_on(shares)
    assert (contest.over, contest.tries, last.decides_as(PLAN)) == (True, False, True)
    steps, rival_s = 3 * len(shares), shares[-1] * SLOW_S
    assert f"tried for {steps} steps: {instead(tried)} took {rival_s:.3f} s a step, not {SLOW_S:.3f} s" in str(last)
    assert carry_out(contest, last, [5.0, 0.1])[1] is last


def test_a_plan_that_takes_about_as_long_as_predicted_has_no_rival() -> None:
    contest, plan = carry_out(Contest(), PLAN, [9.0, 2.0, 1.09 * PLAN.predicted.step_s])
    assert contest.over
    assert plan is PLAN


def test_without_a_rival_nothing_is_tried() -> None:
    kept = decide(FACTS, FACTS.saved_bytes * 2)
    contest, plan = carry_out(Contest(), kept, [1.0, 1.0, 1.0])
    assert contest.over
    assert plan is kept
