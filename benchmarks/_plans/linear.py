"""Linear program: decides on a step in fluid form, solved by HiGHS, and rounds it to whole blocks and storages.

A step is cut into buckets along its blocks. Of each bucket a share of the blocks recomputes and so many bytes move;
queue, read-ahead and memory are levels between buckets, and stalls are what the step waits. All of it is linear. The
shares are then rounded by error diffusion along the layers, and raised until the simulated step fits the budget.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from tba._plan.facts import OUTSIDE, Facts
from tba._plan.greedy import make, movable
from tba._plan.plan import Plan

_MOST_BUCKETS = 64
_KINDS = "recompute", "move", "wait_out", "queue", "wait_back", "ahead", "read"
_TRIES = 12


@dataclass(frozen=True)
class Buckets:
    """A step cut into buckets, in order of forward: what each saves, computes and may recompute."""

    of_block: list[int]
    of_storage: list[int]
    block_bytes: np.ndarray
    other_bytes: np.ndarray
    gain_bytes: np.ndarray
    replay_s: np.ndarray
    largest_bytes: np.ndarray
    movable_bytes: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray


def cut(facts: Facts, budget_bytes: int) -> Buckets:
    """Cut a step into at most `_MOST_BUCKETS` along its blocks, or along time where it has none."""
    begins = [block.begin_s for block in facts.blocks] or list(np.linspace(0, facts.forward_s, 16, endpoint=False))
    count = min(len(begins), _MOST_BUCKETS)
    bucket_of = [number * count // len(begins) for number in range(len(begins))]
    visits = np.searchsorted(begins, [each.saved_s for each in facts.saved], side="right") - 1
    places = [
        bucket_of[max(0, int(visit)) if each.place.block == OUTSIDE else each.place.block]
        for each, visit in zip(facts.saved, visits, strict=True)
    ]
    sums = {name: np.zeros(count) for name in ("block", "other", "gain", "replay", "largest", "movable")}
    for each, place in zip(facts.saved, places, strict=True):
        again = each.place.block != OUTSIDE and _may(facts, each.place.block)
        sums["block" if again else "other"][place] += each.nbytes
    for number in range(len(facts.blocks)):
        if _may(facts, number):
            place = bucket_of[number]
            sums["gain"][place] += facts.block_bytes(number) - facts.blocks[number].input_bytes
            sums["replay"][place] += facts.blocks[number].replay_s or 0.0
            sums["largest"][place] = max(sums["largest"][place], facts.block_bytes(number))
    for index in movable(facts, frozenset(), budget_bytes):
        sums["movable"][places[index]] += facts.saved[index].nbytes
    firsts = [begins[bucket_of.index(place)] for place in range(count)]
    forward_s = np.diff([0.0, *firsts[1:], facts.forward_s])
    share = forward_s / max(facts.forward_s, 1e-12)
    return Buckets(
        bucket_of if facts.blocks else [],
        places,
        sums["block"],
        sums["other"],
        sums["gain"],
        sums["replay"],
        sums["largest"],
        sums["movable"],
        forward_s,
        share * facts.backward_s,
    )


def decide_linear(facts: Facts, budget_bytes: int) -> Plan:
    """Decide on a step by the linear program; the best of its roundings that the simulator finds."""
    nothing = make(facts, budget_bytes, frozenset(), frozenset())
    if nothing.fits:
        return nothing
    buckets = cut(facts, budget_bytes)
    shares = solve(facts, budget_bytes, buckets)
    if shares is None:
        return nothing
    recompute, move = shares
    may = [number for number in range(len(facts.blocks)) if _may(facts, number)]
    plans: list[Plan] = []
    for begun in (0.0, 0.49, -0.49, 1.0, 2.0, 3.0):  # a block more or less; more of them only where nothing fits
        if begun >= 1.0 and any(plan.fits for plan in plans):
            break
        chosen, owed = set(), begun
        for number in may:
            owed += recompute[buckets.of_block[number]]
            if owed >= 0.5:
                chosen.add(number)
                owed -= 1
        plans.append(_rounded(facts, budget_bytes, frozenset(chosen), move, buckets))
    return min(plans, key=lambda plan: (not plan.fits, plan.predicted.step_s if plan.fits else plan.missing_bytes))


def solve(facts: Facts, budget_bytes: int, buckets: Buckets) -> tuple[np.ndarray, np.ndarray] | None:
    """Solve the program; returns for each bucket the share that recomputes and the bytes that move."""
    count, link = len(buckets.forward_s), facts.link
    column = {kind: offset * count for offset, kind in enumerate(_KINDS)}
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    limits: list[float] = []

    def at_most(limit: float, *terms: tuple[str, int, float]) -> None:
        for kind, bucket, value in terms:
            rows.append(len(limits))
            columns.append(column[kind] + bucket)
            values.append(value)
        limits.append(limit)

    taken_s, out, back = link.step_s_per_byte / 2, link.write_bytes_per_s, link.read_bytes_per_s
    room, saved = budget_bytes - facts.largest_bytes, buckets.block_bytes + buckets.other_bytes
    # A unit of bytes is a MiB, so that the solver's tolerances fit.
    mib = float(1 << 20)
    for k in range(count):
        at_most(saved[k] / mib, ("move", k, 1.0), ("recompute", k, buckets.block_bytes[k] / mib))
        before = [("queue", k - 1, 1.0)] if k else []
        at_most(
            out * buckets.forward_s[k] / mib,
            ("queue", k, -1.0),
            ("move", k, 1.0 - out * taken_s),
            ("wait_out", k, -out / mib),
            *before,
        )
        kept = [
            each for j in range(k + 1) for each in (("move", j, -1.0), ("recompute", j, -buckets.gain_bytes[j] / mib))
        ]
        at_most((room - saved[: k + 1].sum()) / mib, ("queue", k, 1.0), *kept)
        again = ("recompute", k, buckets.largest_bytes[k] / mib)
        at_most((budget_bytes - saved[: k + 1].sum() + saved[k]) / mib, ("ahead", k, 1.0), again, *kept[:-2])
        at_most(
            back * buckets.backward_s[k] / mib,
            ("read", k, 1.0),
            ("move", k, -back * taken_s),
            ("recompute", k, -back * buckets.replay_s[k] / mib),
            ("wait_back", k, -back / mib),
        )
        # What is ahead after bucket k of backward is what was, and what it reads, less what it uses.
        after = [("ahead", k - 1, 1.0)] if k else []
        at_most(0.0, *after, ("ahead", k, -1.0), ("read", k, -1.0), ("move", k, 1.0))
    at_most(facts.most_moved_bytes / mib, *(("move", k, 1.0) for k in range(count)))
    cost = np.zeros(len(_KINDS) * count)
    bounds: list[tuple[float, float | None]] = [(0.0, None)] * len(cost)
    for k in range(count):
        cost[column["recompute"] + k] = buckets.replay_s[k]
        cost[column["move"] + k] = 2 * taken_s * mib
        cost[column["wait_out"] + k] = cost[column["wait_back"] + k] = 1.0
        bounds[column["recompute"] + k] = (0.0, 1.0 if buckets.gain_bytes[k] > 0 else 0.0)
        bounds[column["move"] + k] = (0.0, buckets.movable_bytes[k] / mib)
        bounds[column["queue"] + k] = (0.0, link.in_flight_bytes / mib)
        bounds[column["ahead"] + k] = (0.0, facts.read_ahead_bytes / mib if k < count - 1 else 0.0)
    matrix = coo_array((values, (rows, columns)), shape=(len(limits), len(cost))).tocsr()
    found = linprog(cost, A_ub=matrix, b_ub=limits, bounds=bounds, method="highs")
    if found.x is None:
        return None
    return found.x[:count], found.x[count : 2 * count] * mib


def _rounded(facts: Facts, budget_bytes: int, recomputed: frozenset[int], move: np.ndarray, buckets: Buckets) -> Plan:
    free: dict[int, float] = defaultdict(float)
    may = movable(facts, recomputed, budget_bytes)
    for index in may:
        free[buckets.of_storage[index]] += facts.saved[index].nbytes
    shares = [move[place] / free[place] if free[place] else 0.0 for place in range(len(move))]
    total, extra = sum(free.values()), 0.0
    best = None
    for _ in range(_TRIES):
        chosen, owed, left_bytes = set(), 0.0, facts.most_moved_bytes
        for index in may:
            each = facts.saved[index]
            owed += min(1.0, shares[buckets.of_storage[index]] + extra) * each.nbytes
            if owed >= each.nbytes / 2 and each.nbytes <= left_bytes:
                chosen.add(index)
                owed -= each.nbytes
                left_bytes -= each.nbytes
        plan = make(facts, budget_bytes, frozenset(chosen), recomputed)
        if best is None or plan.missing_bytes < best.missing_bytes:
            best = plan
        if plan.missing_bytes <= 0 or extra >= 1:
            break
        extra += max(plan.missing_bytes, facts.largest_bytes) / max(total, 1)
    assert best is not None
    return best


def _may(facts: Facts, number: int) -> bool:
    block = facts.blocks[number]
    return block.replay_s is not None and facts.block_bytes(number) > block.input_bytes
