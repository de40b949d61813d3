"""Inputs of blocks that recompute: they move where all else is not enough, and come back ahead of the second run."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.plans import MIB, layers
from support.samples import examples
from tba._plan.facts import Cap, Facts, Spill, input_place
from tba._plan.greedy import decide, decide_moves, make
from tba._plan.simulate import simulate

SLOW = 20e6
ALL = frozenset(range(24))


def test_inputs_that_move_are_read_before_their_blocks_run_again() -> None:
    facts = layers(4, 4, rate=64 * MIB, input_bytes=MIB)
    blocks = frozenset(range(4))
    inputs = facts.inputs(blocks)
    found = simulate(facts, inputs, blocks)
    assert inputs == [16, 17, 18, 19]
    assert found.moved_bytes == found.read_bytes == 4 * MIB
    assert sum(moment.kept_bytes for moment in found.moments) < sum(
        moment.kept_bytes for moment in simulate(facts, (), blocks).moments
    )
    # Backward begins with the last block, which waits for its input: 1 MiB at 64 MiB/s.
    assert found.waited_s == pytest.approx(1 / 64, rel=0.01)
    assert found.moments[-1].nbytes == 0


def test_inputs_of_blocks_that_do_not_recompute_mean_nothing() -> None:
    facts = layers(4, 4, input_bytes=MIB)
    assert simulate(facts, facts.inputs((2,)), (1,)).moved_bytes == 0
    plan = make(facts, 1 << 40, frozenset(facts.inputs((2, 3))), frozenset({1, 3}))
    assert plan.inputs == plan.sends == {input_place(3): MIB}


def test_a_budget_below_what_full_checkpointing_holds_moves_inputs_and_little_else() -> None:
    facts = layers(24, 8, rate=SLOW, input_bytes=2 * MIB)
    checkpointed = simulate(facts, (), ALL)
    budget = int(0.7 * checkpointed.peak.nbytes)
    plan = decide(facts, budget)
    assert plan.fits
    assert len(plan.recomputed) >= 23  # the last block's second run would come beside what is still on its way out
    assert 0 < sum(plan.inputs.values()) <= sum(plan.sends.values()) < 48 * MIB
    everything = make(facts, budget, frozenset(facts.movable), frozenset())
    assert plan.predicted.step_s < 0.3 * everything.predicted.step_s
    assert f"their inputs moved, {len(plan.inputs)}" in str(plan)


def test_where_blocks_are_settled_their_inputs_may_move() -> None:
    facts = layers(24, 8, rate=SLOW, input_bytes=2 * MIB)
    budget = int(0.7 * simulate(facts, (), ALL).peak.nbytes)
    decided = decide(facts, budget)
    plan = decide_moves(facts, budget, decided.recomputed)
    assert plan.fits
    assert plan.inputs
    assert plan.recomputed == decided.recomputed


def test_inputs_count_for_what_a_step_may_write() -> None:
    facts = layers(24, 8, rate=SLOW, input_bytes=2 * MIB)
    budget = int(0.7 * simulate(facts, (), ALL).peak.nbytes)
    enough = sum(decide(facts, budget).sends.values())
    assert decide(replace(facts, cap=Cap(enough, "a disk")), budget).fits
    assert not decide(replace(facts, cap=Cap(enough // 2, "a disk")), budget).fits


def _drawn(seed: int) -> tuple[Facts, int]:
    draw = random.Random(seed)
    rate, nbytes = draw.choice([2e7, 5e7, 1e8, 4e8, 2e9]), draw.choice([1, 2, 4]) * MIB
    count, each = draw.choice([3, 8, 12, 24]), draw.choice([2, 4, 8])
    facts = layers(count, each, nbytes=nbytes, rate=rate, input_bytes=draw.choice([1, 2, 4]) * MIB)
    if draw.random() < 0.3:
        disk = Spill(draw.choice([0, 16, 400]) * MIB, 4 * MIB, 1e7, 1e7)
        facts = replace(facts, link=replace(facts.link, write_bytes_per_s=2e9, read_bytes_per_s=2e9, spill=disk))
    return facts, int(draw.choice([0.04, 0.08, 0.12, 0.2, 0.3, 0.5]) * facts.saved_bytes)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10_000))
def test_no_plan_is_slower_for_inputs_that_may_move(seed: int) -> None:
    facts, budget = _drawn(seed)
    plan = decide(facts, budget)

    class Staying(Facts):
        def inputs(self, _: Any) -> list[int]:
            return []

    other = decide(Staying(**{name: getattr(facts, name) for name in Facts.__match_args__}), budget)
    assert plan.fits or not other.fits
    assert not other.fits or plan.predicted.step_s <= 1.002 * other.predicted.step_s
