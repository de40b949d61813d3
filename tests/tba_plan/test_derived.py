"""Deriving in plans: what it saves and costs, when it is chosen, and what of it a plan tells."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from support.plans import layers
from tba._plan.facts import Facts, Place
from tba._plan.greedy import decide, make
from tba._plan.plan import Plan
from tba._plan.simulate import simulate

SLOW = 20e6


def derivable(facts: Facts, derive_s: float, every: int = 2) -> Facts:
    """Each `every`th storage follows from the one before it in its block."""
    saved = tuple(
        replace(each, derive_s=derive_s, sources=(Place(each.place.block, each.place.number - 1),))
        if each.place.number % every == every - 1
        else each
        for each in facts.saved
    )
    return replace(facts, saved=saved)


def test_a_derived_storage_takes_no_bytes_and_the_seconds_of_making_it() -> None:
    facts = derivable(layers(4, 4), 0.01)
    derived = frozenset(facts.derivable)
    assert len(derived) == 8
    plan = make(facts, 1 << 40, frozenset(), frozenset(), derived)
    assert plan.predicted.peak.nbytes == facts.saved_bytes // 2
    assert plan.predicted.step_s == pytest.approx(facts.step_s + 8 * 0.01)
    assert plan.derived_s == pytest.approx(8 * 0.01)
    assert not plan.idle


def test_sources_come_back_when_what_follows_from_them_is_asked_for() -> None:
    facts = derivable(layers(1, 4), 0.01)
    ahead = facts.deriving({3})
    assert ahead.saved[2].wanted_s == facts.saved[3].wanted_s
    assert ahead.saved[2].outlasts(ahead.saved[3].wanted_s)  # until it is asked for itself
    assert ahead.saved[1].wanted_s == pytest.approx(facts.saved[1].wanted_s + 0.01)
    assert facts.deriving(()) is facts
    slow = replace(facts, link=replace(facts.link, write_bytes_per_s=1e12, read_bytes_per_s=1e6))
    waits = [simulate(each, {2}, ()).waited_s for each in (slow, slow.deriving({3}))]
    assert waits[1] > waits[0]


@pytest.mark.parametrize(
    ("derive_s", "rate", "derives"), [(1e-5, SLOW, True), (10.0, SLOW, False), (1e-3, 1e12, False)]
)
def test_what_is_cheapest_a_byte_is_chosen(derive_s: float, rate: float, derives: bool) -> None:
    facts = derivable(layers(8, 4, rate=rate), derive_s)
    plan = decide(facts, int(0.75 * facts.saved_bytes))
    assert plan.fits
    assert bool(plan.derived) is derives
    assert bool(plan.sends or plan.recomputed) is not derives
    assert ("derived" in str(plan)) is derives


@pytest.mark.parametrize(("cheaper", "derives"), [(0.01, False), (0.02, False), (0.05, True)])
def test_deriving_has_to_be_cheaper_by_more_than_the_model_errs_about_it(cheaper: float, derives: bool) -> None:
    plain = layers(8, 4, rate=1e3)  # nothing moves in a step's time
    budget = int(0.75 * plain.saved_bytes)
    other, nothing = decide(plain, budget), frozenset[int]()

    def just_enough(facts: Facts) -> Plan:
        """Derive until it fits, and nothing else."""
        may = facts.derivable
        plans = (make(facts, budget, nothing, nothing, frozenset(may[:count])) for count in range(1, len(may) + 1))
        return next(plan for plan in plans if plan.fits)

    count = len(just_enough(derivable(plain, 1e-9)).derived)
    facts = derivable(plain, ((1 - cheaper) * other.predicted.step_s - plain.step_s) / count)
    assert just_enough(facts).predicted.step_s == pytest.approx((1 - cheaper) * other.predicted.step_s)
    assert bool(decide(facts, budget).derived) is derives


def test_no_more_is_derived_than_is_needed() -> None:
    facts = derivable(layers(8, 4, rate=SLOW), 1e-3)
    plans = [decide(facts, int(share * facts.saved_bytes)) for share in (0.9, 0.8, 0.7)]
    counts = [len(plan.derived) for plan in plans]
    assert 0 < counts[0] < counts[1] < counts[2]


def test_beneath_what_deriving_saves_the_rest_moves_or_recomputes() -> None:
    facts = derivable(layers(8, 4, rate=SLOW), 1e-5)
    plan = decide(facts, int(0.35 * facts.saved_bytes))
    assert plan.fits
    assert plan.sends or plan.recomputed
    for index in plan.derived:
        blocks = {facts.saved[index].place.block, *(place.block for place in facts.saved[index].sources)}
        assert not blocks & plan.recomputed


@pytest.mark.parametrize("share", [0.4, 0.7])
def test_no_plan_that_derives_is_below_the_bound(share: float) -> None:
    facts = derivable(layers(2, 3, rate=1e8), 0.004, every=3)
    budget = int(share * facts.saved_bytes)
    bound = decide(facts, budget).bound_s
    sets = [frozenset(some) for count in range(3) for some in combinations(facts.derivable, count)]
    every = range(len(facts.saved))
    for derived in sets:
        for moved in (frozenset(some) for count in range(3) for some in combinations(every, count)):
            for blocks in (frozenset(), frozenset({0}), frozenset({0, 1})):
                plan = make(facts, budget, moved - derived, blocks, derived)
                assert not plan.fits or plan.predicted.step_s >= bound - 1e-9


def test_a_plan_simulated_anew_derives_the_same() -> None:
    facts = derivable(layers(8, 4, rate=SLOW), 1e-3)
    plan = decide(facts, int(0.75 * facts.saved_bytes))
    again = plan.under(facts.scaled(2.0), plan.budget_bytes)
    assert again.decides_as(plan)
    assert again.derived_s == pytest.approx(2 * plan.derived_s)
    assert not plan.decides_as(replace(plan, derived=frozenset()))
