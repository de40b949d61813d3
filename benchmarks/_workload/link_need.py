"""Link need: bytes per second that a link has to carry for a step that moves all it saves to hardly wait. Pure.

Writes begin when a tensor is saved, reads have to end when it is asked for; each direction has a window: bytes that may
be under way, or read ahead. Reads are writes seen backwards: what is asked for last could be read first. What moves
takes time from the computation, on any link: so much later is what follows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike

from tba import Plan

# Waiting that does not count, as a share of the step.
HARDLY = 0.005
_LEAST, _MOST = 1e6, 1e12  # bytes per second between which it is searched


def needed_bytes_per_s(plan: Plan) -> float:
    """Search it by what a plan was made from. What backward wants first is held back: it is not written nor read."""
    facts, held = plan.facts, 0
    moved = list(facts.order_wanted)
    while moved and held + facts.saved[moved[0]].nbytes <= facts.read_ahead_bytes:
        held += facts.saved[moved.pop(0)].nbytes
    taken_s = facts.link.step_s_per_byte / 2  # a byte moved one way, from the computation
    writes = slowed([(facts.saved[index].saved_s, facts.saved[index].nbytes) for index in sorted(moved)], taken_s)
    reads = slowed(
        [(facts.backward_s - facts.saved[index].wanted_s, facts.saved[index].nbytes) for index in reversed(moved)],
        taken_s,
    )
    moved_bytes = sum(nbytes for _, nbytes in writes)
    hardly_s = HARDLY * (facts.step_s + 2 * taken_s * moved_bytes)
    low, high = math.log(_LEAST), math.log(_MOST)
    while high - low > 0.001:
        rate = math.exp((low + high) / 2)
        waits_s = waiting_s(writes, rate, facts.link.in_flight_bytes) + waiting_s(reads, rate, facts.read_ahead_bytes)
        low, high = (low, math.log(rate)) if waits_s <= hardly_s else (math.log(rate), high)
    return math.exp(high)


def slowed(arrivals: Sequence[tuple[float, int]], taken_s: float) -> list[tuple[float, int]]:
    """Return when bytes come to be carried if each byte before them has taken `taken_s` from the computation."""
    before_bytes = accumulate((nbytes for _, nbytes in arrivals), initial=0)
    return [(at_s + taken_s * before, nbytes) for (at_s, nbytes), before in zip(arrivals, before_bytes, strict=False)]


def rule_of_thumb_bytes_per_s(plan: Plan) -> float:
    """Compute the paper's: all that is saved, over half of the step."""
    return plan.facts.saved_bytes / (plan.facts.step_s / 2)


def waiting_s(arrivals: Sequence[tuple[float, int]], rate: float, window_bytes: float) -> float:
    """Count the seconds that work waits for a link, which carries one transfer at a time, in order.

    Args:
        arrivals: at what second of the work how many bytes come to be carried.
        rate: bytes per second.
        window_bytes: that may be under way at once; one transfer always may.
    """
    late_s = free_s = 0.0
    under_way: deque[tuple[float, int]] = deque()  # end, bytes
    under_way_bytes = 0
    for at_s, nbytes in arrivals:
        now_s = at_s + late_s
        while under_way and (under_way[0][0] <= now_s or under_way_bytes + nbytes > window_bytes):
            end_s, carried = under_way.popleft()
            under_way_bytes -= carried
            now_s = max(now_s, end_s)
        late_s = now_s - at_s
        free_s = max(now_s, free_s) + nbytes / rate
        under_way.append((free_s, nbytes))
        under_way_bytes += nbytes
    return late_s


def begins_to_wait(rates: ArrayLike, waited_s: ArrayLike, *, floor_s: float) -> float | None:
    """Find the rate at which waiting begins, from steps at several rates: waiting is a straight line over 1 / rate.

    The line goes through the three highest rates whose steps wait for more than `floor_s`; where it is at half of that,
    waiting begins. None: fewer than two wait.
    """
    order = np.argsort(np.asarray(rates, dtype=float))[::-1]
    slowness, waited = 1.0 / np.asarray(rates, dtype=float)[order], np.asarray(waited_s, dtype=float)[order]
    late = np.flatnonzero(waited > floor_s)[:3]
    if len(late) < 2:
        return None
    slope, offset = np.polyfit(slowness[late], waited[late], 1)
    begin = (floor_s / 2 - offset) / slope
    return float(1.0 / begin) if slope > 0 and begin > 0 else None
