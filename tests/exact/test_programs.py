"""The engine against plain PyTorch over programs that hypothesis thinks of: views, edits, hooks, graphs kept or not."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from campaigns.device import shuffle
from campaigns.programs.check import (
    WAYS,
    Outcome,
    ShortCollections,
    compare,
    difference,
    maker,
    through_engine,
    through_plain,
    ways_of,
)
from campaigns.programs.machine import EDITED, NAMES, Instruction
from support import gpu
from support.engine import ALL_INT8
from support.samples import examples
from tba import OffloadStats

NUMBERS = st.integers(0, 255)
PROGRAMS = st.lists(st.tuples(st.sampled_from(NAMES), NUMBERS, NUMBERS, NUMBERS), min_size=4, max_size=40)

SOME = settings(
    derandomize=True,
    deadline=None,
    max_examples=6
    if gpu.SIMULATED
    else examples(25),  # `python -m tests.campaigns programs --device simulated` has more
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


COLLECTIONS = ShortCollections()


@SOME
@given(program=PROGRAMS)
def test_programs_leave_the_same_bits(device: torch.device, scratch: Path, program: list[Instruction]) -> None:
    COLLECTIONS.before_a_program()
    shuffle(device, len(program))
    plain = through_plain(program, device)
    for way, (plan, chosen) in ways_of(device).items():
        found = compare(program, maker(device, scratch), plan, device=device, plain=plain, **chosen)
        assert found == "", f"{way}: {found}"


@SOME
@given(program=PROGRAMS)
def test_what_is_lost_does_not_depend_on_tier_or_timing(
    device: torch.device, scratch: Path, program: list[Instruction]
) -> None:
    COLLECTIONS.before_a_program()
    shuffle(device, len(program))
    make = maker(device, scratch)
    kept, there = through_engine(program, make, None, device=device, tier="keep", compress=ALL_INT8)
    for way in ("all moves", "small window", "failing", "auto"):
        plan, chosen = WAYS[way]
        moved, here = through_engine(program, make, plan, device=device, **chosen, compress=ALL_INT8)
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
    if gpu.SIMULATED:
        return  # nothing is made of a tensor whose graph is gone before the device has told its values
    assert (here.encoded_bytes, here.packed_bytes, here.derived_bytes) == (
        there.encoded_bytes,
        there.packed_bytes,
        there.derived_bytes,
    )
