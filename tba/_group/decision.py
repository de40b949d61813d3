"""Decision: which blocks a group of ranks recomputes, concluded from the facts of all. Pure.

It is decided once for the slowest of them: with the steps of the rank that takes longest, the most bytes that any saves
in each place, the least budget, and each rate of the slowest link. What fits there fits on each rank. What moves is
then each rank's own matter (`decide_moves`): no other rank can tell whether it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from .._plan.facts import Block, Facts, Link, Saved
from .._plan.greedy import decide, decide_moves, fitting
from .._text import size


@dataclass(frozen=True)
class Share:
    """What one rank says about its step.

    Attributes:
        facts: of the step.
        budget_bytes: that its saved tensors may hold.
        joint: its blocks that communicate.
    """

    facts: Facts
    budget_bytes: int
    joint: frozenset[int]


@dataclass(frozen=True)
class Decision:
    """What all ranks do.

    Attributes:
        recomputed: blocks that run again, by their number in the step.
        joint: those of them that communicate.
        told: who has decided, which rank binds, and why, in words.
    """

    recomputed: frozenset[int]
    joint: frozenset[int]
    told: str


def decide_together(ranks: Sequence[int], shares: Sequence[Share]) -> Decision | None:
    """Decide for all ranks; None if their steps are not alike."""
    if len({(tuple(each.place for each in share.facts.saved), len(share.facts.blocks)) for share in shares}) > 1:
        return None
    facts, budget_bytes = slowest([share.facts for share in shares]), min(share.budget_bytes for share in shares)
    recomputed = fitting(decide, facts, budget_bytes).recomputed
    moves = partial(decide_moves, recomputed=recomputed)
    own = [fitting(moves, share.facts, share.budget_bytes) for share in shares]
    slow = max(range(len(own)), key=lambda number: (not own[number].fits, own[number].predicted.step_s, -number))
    link = own[slow].facts.link
    told = (
        f"agreed by ranks {', '.join(map(str, ranks))}: rank {ranks[slow]} binds, with a budget of "
        f"{size(own[slow].budget_bytes)} and a link that carries {size(link.write_bytes_per_s)}/s out and "
        f"{size(link.read_bytes_per_s)}/s back"
    )
    return Decision(recomputed, recomputed & frozenset().union(*(share.joint for share in shares)), told)


def slowest(facts: Sequence[Facts]) -> Facts:
    """Return the facts of a step that no rank takes longer for, and none saves more in."""
    base = max(facts, key=lambda each: each.step_s)
    caps = [each.cap for each in facts if each.cap is not None]
    return replace(
        base,
        saved=tuple(map(_most, base.saved, zip(*(each.saved for each in facts), strict=True))),
        blocks=tuple(map(_longest, base.blocks, zip(*(each.blocks for each in facts), strict=True))),
        link=_slowest_link(base.link, [each.link for each in facts]),
        read_ahead_bytes=min(each.read_ahead_bytes for each in facts),
        cap=min(caps, key=lambda cap: cap.nbytes, default=None),
    )


def _most(base: Saved, alike: tuple[Saved, ...]) -> Saved:
    plain_bytes = max(each.replayed_bytes for each in alike)
    return replace(base, nbytes=max(each.nbytes for each in alike), plain_bytes=plain_bytes)


def _longest(base: Block, alike: tuple[Block, ...]) -> Block:
    refused = next((each for each in alike if each.replay_s is None), None)
    input_bytes = max(each.input_bytes for each in alike)
    if refused is not None:
        return replace(base, replay_s=None, input_bytes=input_bytes, why_not=refused.why_not)
    return replace(base, replay_s=max(each.replay_s or 0.0 for each in alike), input_bytes=input_bytes)


def _slowest_link(base: Link, links: Sequence[Link]) -> Link:
    spills = [each.spill for each in links if each.spill is not None]
    return replace(
        base,
        write_bytes_per_s=min(each.write_bytes_per_s for each in links),
        read_bytes_per_s=min(each.read_bytes_per_s for each in links),
        step_s_per_byte=max(each.step_s_per_byte for each in links),
        in_flight_bytes=min(each.in_flight_bytes for each in links),
        spill=min(spills, key=lambda each: each.write_bytes_per_s, default=None),
    )
