"""The lower bound: no plan is below it, and where the end of forward is all that binds, plans come close."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.plans import MIB, layers, storages
from support.samples import examples
from tba._plan.bound import lower_bound_s
from tba._plan.facts import Link
from tba._plan.greedy import decide
from tba._plan.simulate import simulate


def test_what_fits_takes_the_step() -> None:
    facts = layers(4, 4)
    assert lower_bound_s(facts, facts.saved_bytes) == facts.step_s


def test_what_is_held_only_in_backward_is_none_of_forwards() -> None:
    facts = storages([8 * MIB] * 4, Link(1e7, 1e7, 1e-10), read_ahead_bytes=4 * MIB)
    late = replace(facts, saved=(*facts.saved[:2], *(replace(each, saved_s=1.1) for each in facts.saved[2:])))
    plan = decide(late, 20 * MIB)
    assert plan.fits
    assert plan.bound_s <= plan.predicted.step_s
    assert plan.bound_s < facts.step_s + 0.01 < lower_bound_s(facts, 20 * MIB)


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.integers(1, 8), min_size=2, max_size=8), st.floats(0.3, 1.0), st.sampled_from([1e9, 1e8, 2e7]))
def test_no_plan_of_storages_is_below(sizes: list[int], share: float, rate: float) -> None:
    link = Link(rate, rate, 1e-10, step_s_per_record=1e-3)
    facts = storages([size * MIB for size in sizes], link, read_ahead_bytes=4 * MIB)
    budget = int(share * facts.saved_bytes)
    bound = lower_bound_s(facts, budget)
    every = range(len(facts.saved))
    for moved in (some for n in range(len(sizes) + 1) for some in combinations(every, n)):
        found = simulate(facts, moved, (), budget)
        if found.peak.nbytes <= budget:
            assert found.step_s >= bound - 1e-9


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(2, 24), st.integers(1, 12), st.floats(0.2, 1.0), st.sampled_from([2e9, 4e8, 1e8, 5e7]))
def test_no_plan_that_is_made_is_below(blocks: int, each: int, share: float, rate: float) -> None:
    facts = layers(blocks, each, rate=rate)
    plan = decide(facts, int(share * facts.saved_bytes))
    if plan.fits:
        assert plan.predicted.step_s >= plan.bound_s - 1e-9


@pytest.mark.parametrize("share", [0.4, 0.55, 0.7, 0.85])
@pytest.mark.parametrize("rate", [2e9, 4e8, 2e8, 1e8, 5e7])
def test_plans_come_close(share: float, rate: float) -> None:
    facts = layers(24, 16, rate=rate)
    plan = decide(facts, int(share * facts.saved_bytes))
    assert plan.fits
    assert plan.predicted.step_s <= 1.013 * plan.bound_s
