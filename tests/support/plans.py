"""Facts about steps for tests of the planner, as they might have been observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tba._plan.facts import OUTSIDE, Block, Facts, Link, Place, Saved

MIB = 1 << 20


def layers(
    count: int,
    each: int,
    *,
    nbytes: int = 2 * MIB,
    rate: float = 2e9,
    forward_s: float = 0.5,
    backward_s: float = 1.0,
    replay_s: float | None = 0.0,
    input_bytes: int = 2 * MIB,
) -> Facts:
    """A model of `count` alike blocks that save `each` storages.

    A replay takes what the forward does (0) or `replay_s`; None: no block may recompute.
    """
    saved = []
    for block in range(count):
        for number in range(each):
            done = (block + number / each) / count
            saved.append(Saved(Place(block, number), nbytes, done * forward_s, (1 - done) * backward_s))
    again_s = forward_s / count if replay_s == 0.0 else replay_s
    why_not = "it draws lots" if again_s is None else ""
    blocks = tuple(Block(block / count * forward_s, again_s, input_bytes, why_not) for block in range(count))
    return Facts(tuple(saved), blocks, forward_s, backward_s, Link(rate, rate, 1e-10), 24 * MIB)


def storages(sizes: Sequence[int], link: Link, *, read_ahead_bytes: int = 24 * MIB) -> Facts:
    """A step without blocks that saves storages of these sizes at even distances."""
    saved = tuple(
        Saved(Place(OUTSIDE, number), nbytes, number / len(sizes), 2 * (1 - (number + 1) / len(sizes)))
        for number, nbytes in enumerate(sizes)
    )
    return Facts(saved, (), 1.0, 2.0, link, read_ahead_bytes)


def parted(facts: Facts, kinds: dict[str, tuple[int, int, float]]) -> Facts:
    """The facts, where blocks have parts: by class, which of a block's storages are theirs, and their share of it."""
    parts = [
        replace(
            block,
            begin_s=block.begin_s + share_before * (block.replay_s or 0.0),
            replay_s=None if block.replay_s is None else share * block.replay_s,
            within=number,
            kind=kind,
            first=first,
            last=last,
        )
        for number, block in enumerate(facts.blocks)
        for kind, (first, last, share) in kinds.items()
        for share_before in [first / len(facts.by_block[number])]
    ]
    return replace(facts, blocks=(*facts.blocks, *parts))
