"""The engine against plain PyTorch over programs that hypothesis thinks of: views, edits, hooks, graphs kept or not."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path

import pytest
from campaigns.programs.check import WAYS, compare, difference, through_engine
from campaigns.programs.machine import EDITED, NAMES, Instruction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.engine import ALL_INT8, engine

NUMBERS = st.integers(0, 255)
PROGRAMS = st.lists(st.tuples(st.sampled_from(NAMES), NUMBERS, NUMBERS, NUMBERS), min_size=4, max_size=40)

SOME = settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def _what_is_there_stays() -> None:
    """Each program ends with a collection, which then looks at its own objects alone."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("way", WAYS)
@SOME
@given(program=PROGRAMS)
def test_programs_leave_the_same_bits(scratch: Path, way: str, program: list[Instruction]) -> None:
    plan, chosen = WAYS[way]
    assert compare(program, partial(engine, scratch), plan, **chosen) == ""


@pytest.mark.parametrize("way", ["all moves", "small window", "failing", "auto"])
@SOME
@given(program=PROGRAMS)
def test_what_is_lost_does_not_depend_on_tier_or_timing(scratch: Path, way: str, program: list[Instruction]) -> None:
    plan, chosen = WAYS[way]
    make = partial(engine, scratch)
    kept, there = through_engine(program, make, None, tier="keep", compress=ALL_INT8)
    moved, here = through_engine(program, make, plan, **chosen, compress=ALL_INT8)
    for number, (wanted, found) in enumerate(zip(kept, moved, strict=True)):
        if EDITED in wanted[0] and found != wanted:
            return  # bytes that had moved are safe from an edit
        assert found == wanted, f"step {number}: {difference(wanted, found)}"
    if any(name in ("inplace", "edit_grad") for name, *_ in program):
        return  # an edit of a tensor that is being written leaves nothing that others could be derived from
    assert (here.encoded_bytes, here.packed_bytes, here.derived_bytes) == (
        there.encoded_bytes,
        there.packed_bytes,
        there.derived_bytes,
    )
