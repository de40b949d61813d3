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


@pytest.mark.parametrize(("share", "wins"), [(0.9, True), (0.98, False), (1.2, False)])
def test_each_has_three_steps_and_the_faster_one_stays(share: float, wins: bool) -> None:
    rival_s = share * SLOW_S
    contest, plan = carry_out(Contest(), PLAN, [9.0, SLOW_S])  # the first of three does not count
    assert plan is PLAN
    contest, tried = carry_out(contest, plan, [SLOW_S + 0.1])
    assert contest.tries
    assert not tried.sends
    assert "on trial" in str(tried)
    contest, tried = carry_out(contest, tried, [0.1, rival_s])
    assert contest.tries
    contest, last = carry_out(contest, tried, [rival_s + 0.1])
    assert (contest.over, contest.tries, last.decides_as(tried), last.decides_as(PLAN)) == (True, False, wins, not wins)
    told = f"recomputing {len(tried.recomputed)} blocks and moving nothing"
    lines = str(last)
    if wins:
        assert f"a step takes {rival_s:.3f} s, not {SLOW_S:.3f} s: {told}" in lines
        assert "on trial" not in lines
    else:
        assert f"tried for 3 steps: {told} took {rival_s:.3f} s a step, not {SLOW_S:.3f} s" in lines
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
