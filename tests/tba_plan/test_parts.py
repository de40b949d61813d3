"""Decisions on parts of blocks: the cheap ones recompute, evenly, and nothing recomputes twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.plans import MIB, layers, parted
from support.samples import examples
from tba._plan.facts import OUTSIDE, Facts
from tba._plan.greedy import by_hand, decide, make
from tba._plan.plan import Plan
from tba._plan.simulate import simulate

SLOW = 30e6
# Of 16 storages of a block attention saves 6 and takes most of its time; the MLP saves 9.
DEAR_ATTENTION = {"Attention": (0, 6, 0.7), "MLP": (6, 15, 0.25)}


def gpt(rate: float = SLOW, layer_count: int = 12) -> Facts:
    return parted(layers(layer_count, 16, rate=rate), DEAR_ATTENTION)


def assert_nothing_recomputes_twice(plan: Plan) -> None:
    """No part beside its block, and so no storage that two of them make again."""
    made = Counter(index for number in plan.recomputed for index in plan.facts.by_block[number])
    assert set(made.values()) <= {1}


def test_a_part_that_recomputes_keeps_its_input_and_the_rest_of_its_block() -> None:
    facts = gpt(layer_count=4)
    mlps = facts.kinds["MLP"]
    assert mlps == [5, 7, 9, 11]
    assert [facts.block_bytes(number) // MIB for number in (0, *mlps)] == [32, *[18] * 4]
    found = simulate(facts, (), mlps)
    assert found.replayed_s == pytest.approx(facts.forward_s * 0.25)
    # The inputs and the rest of the first three; of the last block, its input, the rest and what it makes again.
    kept = 4 * (2 + 14) * MIB
    assert found.peak.nbytes == kept + 18 * MIB - 2 * MIB  # the last storage of the last block is asked for first
    assert found.moments[-1].nbytes == 0


@pytest.mark.parametrize("share", [0.6, 0.7, 0.85])
def test_dear_attention_is_kept_and_mlps_recompute_evenly(share: float) -> None:
    facts = gpt()
    plan = decide(facts, int(share * facts.saved_bytes))
    assert plan.fits
    assert plan.recomputed
    assert plan.recomputed <= set(facts.kinds["MLP"])
    chosen = sorted(facts.blocks[number].within for number in plan.recomputed)
    gaps = {after - before for before, after in pairwise(chosen)}
    assert max(gaps) - min(gaps) <= 1
    assert plan.predicted.step_s < decide(layers(12, 16, rate=SLOW), plan.budget_bytes).predicted.step_s


def test_where_parts_are_not_enough_blocks_recompute_beside_them() -> None:
    facts = parted(layers(24, 16, rate=SLOW), {"Attention": (0, 6, 0.5), "MLP": (6, 15, 0.34)})
    plan = decide(facts, int(0.35 * facts.saved_bytes))
    assert plan.fits
    by_kind = {kind: plan.recomputed.intersection(alike) for kind, alike in facts.kinds.items()}
    assert by_kind[""]
    assert by_kind["MLP"]
    assert_nothing_recomputes_twice(plan)
    assert f"recomputed, {len(by_kind['MLP'])} of 24 MLP" in str(plan)
    assert f"recomputed, {len(by_kind[''])} of 24 blocks" in str(plan)


@settings(max_examples=examples(40), deadline=None)
@example(0.203125, 1e8, 0.5, 0.5, 8)  # five choices of parts in a row are no better than the best of blocks so far
@given(
    st.floats(0.2, 0.9),
    st.sampled_from([2e9, 4e8, 1e8, SLOW]),
    st.floats(0.1, 0.8),
    st.floats(0.1, 0.5),
    st.sampled_from([4, 8, 12]),
)
def test_parts_make_no_plan_slower(share: float, rate: float, attention: float, mlp: float, count: int) -> None:
    whole = layers(count, 16, rate=rate)
    facts = parted(whole, {"Attention": (0, 6, attention), "MLP": (6, 15, mlp)})
    budget = int(share * facts.saved_bytes)
    plan, before = decide(facts, budget), decide(whole, budget)
    assert_nothing_recomputes_twice(plan)
    assert plan.fits or not before.fits
    if before.fits:
        assert plan.predicted.step_s <= 1.001 * before.predicted.step_s
        assert plan.bound_s <= plan.predicted.step_s


def uneven(seed: int) -> tuple[Facts, int]:
    """A step of blocks that differ in size and cost, and a budget."""
    draw = Random(seed)
    rate, input_bytes = draw.choice([2e9, 4e8, 2e8, 1e8, SLOW]), draw.choice([1, 2, 8]) * MIB
    facts = layers(draw.choice([3, 8, 13]), 16, rate=rate, input_bytes=input_bytes)
    saved = (replace(each, nbytes=int(draw.choice([0.1, 1, 3]) * each.nbytes)) for each in facts.saved)
    blocks = (replace(each, replay_s=(each.replay_s or 0) * draw.choice([0.3, 1, 2])) for each in facts.blocks)
    facts = replace(facts, saved=tuple(saved), blocks=tuple(blocks), read_ahead_bytes=draw.choice([4, 24, 200]) * MIB)
    kinds = {"Attention": (0, 6, draw.uniform(0.1, 0.8)), "MLP": (6, 15, draw.uniform(0.1, 0.5))}
    return parted(facts, kinds), int(draw.uniform(0.1, 0.95) * facts.saved_bytes)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 1000))
@example(11)  # all blocks recompute
@example(128)  # all MLPs do
@example(134)  # all moves
def test_no_plan_is_slower_than_what_a_user_does_by_hand(seed: int) -> None:
    facts, budget = uneven(seed)
    plan, hand = decide(facts, budget), by_hand(facts, range(len(facts.blocks)))
    whole = range(len(facts.kinds[""]))
    for recomputed in (whole, whole[::2], facts.kinds["MLP"]):
        assert (frozenset(), frozenset(recomputed)) in hand
    assert (frozenset(facts.movable), frozenset()) in hand
    for other in (make(facts, budget, *each) for each in hand):
        assert plan.fits or not other.fits
        assert not other.fits or plan.predicted.step_s <= other.predicted.step_s


def test_all_plans_of_few_storages_have_no_part_beside_its_block() -> None:
    facts = parted(layers(2, 4, rate=1e6, input_bytes=MIB), {"MLP": (1, 4, 0.5)})
    plan = decide(facts, int(0.85 * facts.saved_bytes))
    assert plan.recomputed
    assert_nothing_recomputes_twice(plan)
    assert all(facts.blocks[number].within != OUTSIDE for number in plan.recomputed)
