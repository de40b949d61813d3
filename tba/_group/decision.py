"""Decision: which blocks a group of ranks recomputes, concluded from the facts of all. Pure.

It is decided once, for a step that none of them has a harder one than: that of the rank which has to part with most
bytes, with the least budget of all, the slowest link, and the longest second run of each block. A block of which one
rank's second run was not the same recomputes on none. So what fits there fits on each rank. What moves is then each
rank's own matter (`decide_moves`): no other rank can tell whether it did.

A model of one rank's step does not account for ranks waiting on each other. So they time a few steps by what they have
decided. If those take longer than predicted by more than the model's usual error (`contest`), ranks time a few by
another choice of blocks, unless that is predicted to take much longer still. It replaces the first if it is clearly
faster, and faster again in as many steps after those (`after_steps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from .._plan.contest import STEPS, WRONG, is_faster
from .._plan.facts import Block, Facts, Link
from .._plan.greedy import decide, decide_moves, fitting
from .._plan.plan import Plan
from .._text import numbers, short

_NEAR = 1.1  # times as long as steps take: another choice that is predicted to take longer is not tried


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
        predicted_s: seconds that a step by it takes at most, if the model of it is right.
        told: who has decided, and which rank binds by its budget and by its link, in words.
        tried: what came of trying another choice of blocks, in words; "" if none was.
        against: what ranks did before, where they now try this one; None if they try nothing.
        against_s: seconds of a step by that.
        ahead: this choice has already beaten `against` once.
        settled: there is nothing to be timed (any more).
    """

    recomputed: frozenset[int]
    joint: frozenset[int]
    predicted_s: float
    told: str
    tried: str = ""
    against: Decision | None = None
    against_s: float = 0.0
    ahead: bool = False
    settled: bool = False


def decide_together(ranks: Sequence[int], shares: Sequence[Share], *, moves: bool = True) -> Decision | None:
    """Decide for all ranks, of which each `moves` what it decides to, if it may; None if their steps are not alike."""
    if len({len(share.facts.blocks) for share in shares}) > 1:
        return None
    plan = _plan(shares, moves=moves)
    joint, told = plan.recomputed & _joint(shares), _told(ranks, shares)
    return Decision(plan.recomputed, joint, plan.predicted.step_s, told, settled=plan.idle)


def after_steps(decision: Decision, shares: Sequence[Share], seconds: Sequence[float]) -> Decision:
    """Return what ranks do after `STEPS` steps, given what each says now, and its fastest step."""
    step_s, before, before_s = max(seconds), decision.against, decision.against_s
    if before is None:
        return _rival(decision, shares, step_s) or replace(decision, settled=True)
    times = f"{step_s:.3f} s a step, not {before_s:.3f} s"
    if not is_faster(step_s, before_s, ahead=decision.ahead):
        steps = STEPS * (1 + decision.ahead)
        return replace(before, settled=True, tried=f"{_words(decision)} was tried for {steps} steps: it took {times}")
    if not decision.ahead:
        return replace(decision, ahead=True, tried=f"on trial, for {STEPS} more steps")
    tried = f"{_words(decision)} was tried, and stays: it takes {times}"
    return replace(decision, against=None, ahead=False, settled=True, tried=tried)


def _rival(decision: Decision, shares: Sequence[Share], step_s: float) -> Decision | None:
    """Return the other choice of blocks that is predicted to take least.

    None if steps take as long as predicted, or would take much longer by any other choice.
    """
    if step_s <= WRONG * decision.predicted_s:
        return None  # and ranks do not wait for the lowest of them to plan
    plans = [_plan(shares), _plan(shares, moves=False), _plan(shares, recomputes=False)]
    near = [
        plan
        for plan in plans
        if plan.fits and plan.recomputed != decision.recomputed and plan.predicted.step_s <= _NEAR * step_s
    ]
    near.sort(key=lambda plan: plan.predicted.step_s)
    best = next((plan for plan in near if _fits_each(shares, plan.recomputed)), None)
    if best is None:
        return None
    return replace(
        decision,
        recomputed=best.recomputed,
        joint=best.recomputed & _joint(shares),
        predicted_s=best.predicted.step_s,
        tried=f"on trial, for {STEPS} steps",
        against=decision,
        against_s=step_s,
    )


def _fits_each(shares: Sequence[Share], recomputed: frozenset[int]) -> bool:
    return all(decide_moves(each.facts, each.budget_bytes, recomputed).fits for each in shares)


def _plan(shares: Sequence[Share], *, moves: bool = True, recomputes: bool = True) -> Plan:
    budget_bytes = min(share.budget_bytes for share in shares)
    return fitting(partial(decide, moves=moves, recomputes=recomputes), hardest(shares), budget_bytes)


def _joint(shares: Sequence[Share]) -> frozenset[int]:
    return frozenset[int]().union(*(share.joint for share in shares))


def _words(decision: Decision) -> str:
    count = len(decision.recomputed)
    return f"recomputing {count} block{'s' if count > 1 else ''}" if count else "recomputing nothing"


def hardest(shares: Sequence[Share]) -> Facts:
    """Return the facts of a step that none of them has a harder one than. Nothing is derived in it (`decide_moves`)."""
    # What is saved late fills memory too, in backward.
    base = max(shares, key=lambda share: share.facts.saved_bytes - share.budget_bytes).facts
    facts = [share.facts for share in shares]
    caps = [each.cap for each in facts if each.cap is not None]
    return replace(
        base,
        saved=tuple(replace(each, derive_s=None, sources=()) for each in base.saved),
        blocks=tuple(map(_longest, zip(base.blocks, *(each.blocks for each in facts), strict=True))),
        link=_slowest(base.link, [each.link for each in facts]),
        read_ahead_bytes=min(each.read_ahead_bytes for each in facts),
        cap=min(caps, key=lambda cap: cap.nbytes, default=None),
    )


def _longest(alike: tuple[Block, ...]) -> Block:
    """Return a block as the first is, whose second run takes as long as the longest; refused if any was."""
    refused = next((each for each in alike if each.replay_s is None), None)
    if refused is not None:
        return replace(alike[0], replay_s=None, why_not=refused.why_not)
    return replace(alike[0], replay_s=max(each.replay_s or 0.0 for each in alike))


def _slowest(base: Link, links: Sequence[Link]) -> Link:
    spills = [each.spill for each in links if each.spill is not None]
    return replace(
        base,
        write_bytes_per_s=min(each.write_bytes_per_s for each in links),
        read_bytes_per_s=min(each.read_bytes_per_s for each in links),
        step_s_per_byte=max(each.step_s_per_byte for each in links),
        in_flight_bytes=min(each.in_flight_bytes for each in links),
        step_s_per_record=max(each.step_s_per_record for each in links),
        spill=min(spills, key=lambda each: (each.host_bytes, each.write_bytes_per_s), default=None),
    )


def _told(ranks: Sequence[int], shares: Sequence[Share]) -> str:
    places = range(len(ranks))
    small = min(places, key=lambda place: shares[place].budget_bytes)
    links = [share.facts.link for share in shares]
    slow = min(places, key=lambda place: links[place].write_bytes_per_s)
    return (
        f"agreed by ranks {numbers(ranks)}: rank {ranks[small]} has the least room, "
        f"{short(shares[small].budget_bytes)}, rank {ranks[slow]} the slowest link, "
        f"{short(links[slow].write_bytes_per_s)}/s out and {short(links[slow].read_bytes_per_s)}/s back"
    )
