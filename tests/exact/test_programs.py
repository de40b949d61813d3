"""The engine against plain PyTorch over programs that hypothesis thinks of: views, edits, hooks, graphs kept or not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from campaigns.programs.check import WAYS, Outcome, ShortCollections, compare, difference, through_engine, through_plain
from campaigns.programs.machine import EDITED, NAMES, Instruction
from support.engine import ALL_INT8, engine
from support.samples import examples
from tba import OffloadStats

NUMBERS = st.integers(0, 255)
PROGRAMS = st.lists(st.tuples(st.sampled_from(NAMES), NUMBERS, NUMBERS, NUMBERS), min_size=4, max_size=40)

SOME = settings(
    derandomize=True,
    deadline=None,
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


COLLECTIONS = ShortCollections()


@SOME
@given(program=PROGRAMS)
def test_programs_leave_the_same_bits(scratch: Path, program: list[Instruction]) -> None:
    COLLECTIONS.before_a_program()
    plain = through_plain(program)
    for way, (plan, chosen) in WAYS.items():
        found = compare(program, partial(engine, scratch), plan, plain=plain, **chosen)
        assert found == "", f"{way}: {found}"


@SOME
@given(program=PROGRAMS)
def test_what_is_lost_does_not_depend_on_tier_or_timing(scratch: Path, program: list[Instruction]) -> None:
    COLLECTIONS.before_a_program()
    make = partial(engine, scratch)
    kept, there = through_engine(program, make, None, tier="keep", compress=ALL_INT8)
    for way in ("all moves", "small window", "failing", "auto"):
        plan, chosen = WAYS[way]
        moved, here = through_engine(program, make, plan, **chosen, compress=ALL_INT8)
        assert_same_loss(program, kept, moved, there, here)


def assert_same_loss(
    program: list[Instruction], kept: list[Outcome], moved: list[Outcome], there: OffloadStats, here: OffloadStats
) -> None:
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
