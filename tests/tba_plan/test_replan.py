"""Why a plan is made anew after a step by it, and what takes its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from support.plans import MIB, layers
from tba._plan.facts import Cap, Facts, Spill
from tba._plan.greedy import decide
from tba._plan.plan import Measured, Plan
from tba._plan.replan import Shown, follow_up, paces, reason_to_replan

BUDGET = 80 * MIB
FACTS = layers(12, 8, rate=2e8)
PLAN = decide(FACTS, BUDGET)
MEASURED = Measured(PLAN.predicted.step_s, BUDGET)


def shown(facts: Facts = FACTS, **changed: Any) -> Shown:
    """A step as its plan foresaw it, but for what is given."""
    return Shown(**({"facts": facts, "budget_bytes": BUDGET, "measured": MEASURED} | changed))


def linked(times: float, *, back_times: float | None = None) -> Facts:
    link = FACTS.link
    rates = times * link.write_bytes_per_s, (times if back_times is None else back_times) * link.read_bytes_per_s
    return replace(FACTS, link=replace(link, write_bytes_per_s=rates[0], read_bytes_per_s=rates[1]))


def with_disk(times: float) -> Facts:
    spill = Spill(8 * MIB, 4 * MIB, times * 1e8, times * 1e8)
    return replace(FACTS, link=replace(FACTS.link, spill=spill))


def holding(share: float) -> Facts:
    return replace(FACTS, saved=tuple(replace(each, nbytes=int(share * each.nbytes)) for each in FACTS.saved))


def capped(nbytes: int) -> Facts:
    return replace(FACTS, cap=Cap(nbytes, "the day is nearly over"))


REASONS = [
    (shown(linked(1.4)), "the link carries 1.4 times what it did"),
    (shown(linked(0.5)), "the link carries 0.5 times what it did"),
    (shown(linked(1.0, back_times=0.7)), "the link carries 0.7 times what it did"),
    (shown(pace=1.2), "computation takes 1.2 times as long"),
    (shown(pace=0.8), "computation takes 0.8 times as long"),
    (shown(budget_bytes=60 * MIB), "saved tensors may hold 60.0 MiB, not 80.0 MiB"),
    (shown(budget_bytes=100 * MIB), "saved tensors may hold 100.0 MiB, not 80.0 MiB"),
    (shown(holding(0.5)), "codecs leave 96.0 MiB of a step, not 192.0 MiB"),
    (shown(capped(MIB)), "a step may write 1.0 MiB, not 192.0 MiB"),
    (shown(waited_s=0.5), f"steps wait 0.500 s for the link, not {PLAN.predicted.waited_s:.3f} s"),
]


def test_a_disk_beneath_host_memory_that_changes_is_a_reason_of_its_own() -> None:
    before = decide(with_disk(1.0), BUDGET)
    reason = reason_to_replan(before, shown(with_disk(0.3)))
    assert reason == "the disk carries 0.3 times what it did"


@pytest.mark.parametrize(("step", "reason"), REASONS, ids=[reason for _, reason in REASONS])
def test_each_change_is_a_reason_of_its_own(step: Shown, reason: str) -> None:
    assert reason_to_replan(PLAN, step) == reason


def test_more_that_may_be_written_is_a_reason_too() -> None:
    plan = decide(capped(40 * MIB), BUDGET)
    assert reason_to_replan(plan, shown(capped(50 * MIB))) is None
    assert reason_to_replan(plan, shown(capped(70 * MIB))) == "a step may write 70.0 MiB, not 40.0 MiB"


SMALL = [
    shown(),
    shown(linked(1.2)),
    shown(linked(0.85)),
    shown(pace=1.09),
    shown(budget_bytes=int(1.09 * BUDGET)),
    shown(budget_bytes=int(0.91 * BUDGET)),
    shown(holding(0.96)),
    shown(capped(PLAN.predicted.moved_bytes)),
]


@pytest.mark.parametrize("step", SMALL)
def test_small_changes_are_no_reason(step: Shown) -> None:
    assert reason_to_replan(PLAN, step) is None


def never(facts: Facts, budget_bytes: int) -> Plan:
    raise AssertionError("a plan that stands was made anew")


def test_a_plan_that_stands_has_what_was_measured() -> None:
    plan = follow_up(PLAN, shown(pace=1.05), never)
    assert plan == replace(PLAN, measured=MEASURED)


def test_a_link_that_drifts_has_its_plan_simulated_anew() -> None:
    plan = follow_up(PLAN, shown(linked(1.2)), never)
    assert plan.decides_as(PLAN)
    assert plan.facts.link == linked(1.2).link
    assert plan.predicted.step_s <= PLAN.predicted.step_s
    assert (plan.measured, plan.reason) == (MEASURED, "")


def deciding(asked: list[Facts]) -> Callable[[Facts, int], Plan]:
    def made(facts: Facts, budget_bytes: int) -> Plan:
        asked.append(facts)
        return decide(facts, budget_bytes)

    return made


def test_a_plan_that_a_drift_makes_too_large_is_made_anew() -> None:
    tight = next(
        plan
        for share in range(40, 90)
        if (plan := decide(FACTS, share * MIB)).fits
        and not plan.under(replace(linked(0.85), cap=None), share * MIB).fits
    )
    plan = follow_up(tight, shown(linked(0.85), budget_bytes=tight.budget_bytes), deciding([]))
    assert plan.fits
    assert plan.reason == "with a link that carries 0.85 times what it did, it no longer fits"


def test_a_plan_made_anew_says_why_in_one_line() -> None:
    plan = replace(follow_up(PLAN, shown(budget_bytes=50 * MIB), deciding([])), made_in=40)
    assert plan.budget_bytes == 50 * MIB
    last = str(plan).splitlines()[-1]
    assert last == "planned anew at step 40: saved tensors may hold 50.0 MiB, not 80.0 MiB"
    assert last in plan._repr_html_()
    assert "planned anew" not in str(PLAN)


@pytest.mark.parametrize(("share", "stays"), [(1.12, True), (1.3, False)])
def test_a_new_plan_is_worth_the_change_if_it_is_faster_by_a_fiftieth(share: float, stays: bool) -> None:
    asked: list[Facts] = []
    plan = follow_up(PLAN, shown(budget_bytes=int(share * BUDGET)), deciding(asked))
    better_s = decide(FACTS, int(share * BUDGET)).predicted.step_s
    assert asked == [FACTS]
    assert (better_s < PLAN.predicted.step_s, PLAN.predicted.step_s <= 1.02 * better_s) == (True, stays)
    assert (plan.decides_as(PLAN), plan.reason == "") == (stays, stays)


def test_the_first_planned_step_tells_all_of_the_pace_and_each_later_one_half() -> None:
    asked: list[Facts] = []
    first = follow_up(PLAN, shown(pace=1.44, replay_pace=1.44), deciding(asked))
    follow_up(replace(PLAN, measured=MEASURED), shown(pace=1.44, replay_pace=1.44), deciding(asked))
    assert [facts.step_s / FACTS.step_s for facts in asked] == pytest.approx([1.44, 1.2])
    assert first.facts.blocks[0].replay_s == pytest.approx(1.44 * (FACTS.blocks[0].replay_s or 0))


def test_the_pace_is_that_of_computation_alone() -> None:
    replayed_s = PLAN.predicted.replayed_s
    assert replayed_s > 0
    computed_s = 1.1 * FACTS.step_s
    on_host = paces(PLAN, computed_s + 3 * replayed_s + 0.25, 0.25, 3 * replayed_s)
    assert on_host == (pytest.approx(1.1), pytest.approx(3))
    assert paces(PLAN, computed_s + replayed_s + 0.25, 0.25, None) == (pytest.approx(1.1), 1.0)
    assert paces(PLAN, 0.1, 0.2, 0.0) == (1.0, 1.0)  # what was lost is an estimate
    idle = decide(FACTS, 1 << 40)
    assert idle.idle
    assert paces(idle, computed_s, 0.0, 0.0) == (pytest.approx(1.1), pytest.approx(1.1))  # nothing else tells


@pytest.mark.parametrize(("times", "asks"), [(1.05, False), (1.5, True)])
def test_blocks_that_take_longer_to_run_again_ask_for_another_plan(times: float, asks: bool) -> None:
    asked: list[Facts] = []
    plan = follow_up(PLAN, shown(replay_pace=times), deciding(asked))
    assert bool(asked) is asks
    if asks:
        assert [block.replay_s for block in asked[0].blocks] == [
            None if block.replay_s is None else pytest.approx(times * block.replay_s) for block in FACTS.blocks
        ]
        assert asked[0].step_s == FACTS.step_s
        assert plan.decided is not None or plan.reason == f"blocks take {times:.2g} times as long to run again"


TIGHT = decide(FACTS, 30 * MIB)


def test_near_the_bound_no_other_plan_is_looked_for() -> None:
    roomy = decide(FACTS, 150 * MIB)
    assert roomy.predicted.step_s <= 1.02 * roomy.bound_s
    plan = follow_up(roomy, shown(pace=1.3, budget_bytes=150 * MIB), never)
    assert plan.decides_as(roomy)
    assert plan.facts.step_s == pytest.approx(1.3 * FACTS.step_s)
    assert (plan.measured, plan.reason) == (MEASURED, "")


def test_a_pace_that_comes_and_goes_has_a_plan_that_stands_decided_ever_more_seldom() -> None:
    assert TIGHT.fits
    assert TIGHT.predicted.step_s > 1.02 * TIGHT.bound_s
    plan, asked = TIGHT, list[Facts]()
    for _ in range(20):
        for each in (1.25, 1 / 1.25):
            plan = follow_up(plan, shown(plan.facts, pace=each, budget_bytes=30 * MIB), deciding(asked))
    assert plan.decides_as(TIGHT)
    often = len(asked)
    assert 1 <= often <= 6
    follow_up(plan, shown(linked(0.5), budget_bytes=30 * MIB), deciding(asked))
    assert len(asked) == often + 1  # for another reason a plan never just stands


def test_a_pace_that_stays_is_asked_about_however_often_it_came_and_went() -> None:
    facts, budget = layers(8, 3, rate=5e7, input_bytes=MIB), 12_433_632
    plan = decide(facts, budget)
    for each in (1 / 1.35, 1.35) * 20:
        plan = follow_up(plan, shown(plan.facts, pace=each, budget_bytes=budget), decide)
    for _ in range(70):
        pace = 0.75 * facts.step_s / plan.facts.step_s
        plan = follow_up(plan, shown(plan.facts, pace=pace, budget_bytes=budget), decide)
    assert plan.predicted.step_s <= 1.02 * decide(plan.facts, budget).predicted.step_s


@pytest.mark.parametrize("noise", [1.0, 1.25])
@pytest.mark.parametrize(("budgets", "links"), [(1.08, 1.0), (1.0, 1.15)])
def test_what_drifts_is_asked_about_also_where_the_pace_comes_and_goes(
    noise: float, budgets: float, links: float
) -> None:
    plan, budget, rate = TIGHT, 30.0 * MIB, 2e8
    for step in range(20):
        budget, rate = budget * budgets, rate * links
        facts = replace(plan.facts, link=replace(FACTS.link, write_bytes_per_s=rate, read_bytes_per_s=rate))
        pace = noise if step % 2 else 1 / noise
        plan = follow_up(plan, shown(facts, pace=pace, budget_bytes=int(budget)), decide)
    assert plan.predicted.step_s <= 1.05 * decide(plan.facts, plan.budget_bytes).predicted.step_s


def test_being_near_the_bound_at_one_pace_does_not_have_the_plan_decided_again_at_another() -> None:
    facts, budget = layers(12, 4, rate=5e7, replay_s=0.01), 24_738_096
    plan, asked, drawn = decide(facts, budget), list[Facts](), Random(1)
    for _ in range(120):
        pace = drawn.choice([1.0, 2.2]) * facts.step_s / plan.facts.step_s
        plan = follow_up(plan, shown(plan.facts, pace=pace, budget_bytes=budget), deciding(asked))
    assert plan.decides_as(decide(facts, budget))
    assert len(asked) <= 8


def test_a_plan_that_fits_gives_way_to_none_that_does_not() -> None:
    too_small = decide(FACTS, MIB)
    assert not too_small.fits
    plan = follow_up(PLAN, shown(linked(0.5)), lambda facts, budget_bytes: too_small)
    assert plan.decides_as(PLAN)
