"""Choice: which saved tensors of a compiled graph move, as pure functions of their bytes and order.

A budget is met by moving just enough, spread evenly over the step, so that writes begin with the first layer and reads
keep an even pace. What backward wants before a write would be done stays.

A graph can be split in several ways: some save less and compute more in backward. Of those that meet the budget, the
one is taken that costs the step least: by its operations, by the bytes it moves, and by what it waits for a slow link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .._memory.limits import Limits, read_ahead_bytes, window_bytes
from .._plan.greedy import diffuse


class Windows(NamedTuple):
    """Most bytes of what moves that are in memory: on their way out, held for the turn to backward, read ahead."""

    out_bytes: int
    hold_bytes: int
    ahead_bytes: int


class Prices(NamedTuple):
    """What a graph costs a step, in seconds.

    Attributes:
        flop_s: of a floating-point operation.
        byte_s: of a byte that moves out and comes back while nobody waits: on a CPU, transfers take its time.
        write_s, read_s: that the link takes for a byte out, and back; 0 if it is not known to be slow.
    """

    flop_s: float
    byte_s: float
    write_s: float = 0.0
    read_s: float = 0.0


class Choice(NamedTuple):
    """What of a graph's saved tensors moves.

    Attributes:
        moved: their places in the order of forward.
        peak_bytes: the most that saved tensors hold in memory at once.
        windows: of its transfers.
    """

    moved: list[int]
    peak_bytes: int
    windows: Windows


def step_s(moved_bytes: int, forward_flops: int, backward_flops: int, prices: Prices) -> float:
    """Estimate the seconds of a step that moves so many bytes and computes so much, pointwise operators aside."""
    forward_s, backward_s = forward_flops * prices.flop_s, backward_flops * prices.flop_s
    waits_s = max(0.0, moved_bytes * prices.write_s - forward_s) + max(0.0, moved_bytes * prices.read_s - backward_s)
    return forward_s + backward_s + moved_bytes * prices.byte_s + waits_s


def windows_of(limits: Limits, largest_bytes: int) -> Windows:
    """Make the windows of a graph whose largest saved tensor has so many bytes."""
    window = window_bytes(limits, largest_bytes)
    return Windows(limits.staging_bytes, window, read_ahead_bytes(window, largest_bytes))


def choose(
    nbytes: Sequence[int], wanted: Sequence[int], kept_bytes: int, budget_bytes: int | None, limits: Limits
) -> Choice:
    """Choose what moves.

    Args:
        nbytes: of each saved tensor that can move, in the order of forward.
        wanted: the place in backward at which each is wanted.
        kept_bytes: of what cannot move.
        budget_bytes: for all of them; None to move whatever is worth it.
        limits: of transfers.
    """
    windows = windows_of(limits, max(nbytes, default=0))
    if budget_bytes is None:
        return _moving(nbytes, wanted, kept_bytes, windows, 1.0)
    whole_bytes = kept_bytes + sum(nbytes)
    if whole_bytes <= budget_bytes:
        return Choice([], whole_bytes, windows)
    # Each window gets a share of a small budget: one tensor has to fit each of them.
    share_bytes = max(max(nbytes, default=0), budget_bytes // 6)
    windows = Windows(*(min(window, share_bytes) for window in windows))
    choices = (_moving(nbytes, wanted, kept_bytes, windows, share / 16) for share in range(1, 17))
    best = whole = Choice([], whole_bytes, windows)
    for choice in choices:
        best = min(best, choice, key=lambda each: each.peak_bytes)
        if best.peak_bytes <= budget_bytes:
            return best
    return best if best.peak_bytes < whole.peak_bytes else whole


def _moving(nbytes: Sequence[int], wanted: Sequence[int], kept_bytes: int, windows: Windows, share: float) -> Choice:
    """Move a share of what is not wanted as backward begins."""
    held_bytes, free = 0, set(range(len(nbytes)))
    for place in sorted(range(len(nbytes)), key=lambda place: wanted[place]):
        if held_bytes + nbytes[place] > windows.hold_bytes:
            break
        held_bytes += nbytes[place]
        free.discard(place)
    candidates = sorted(free)
    moved = [candidates[place] for place in diffuse([nbytes[place] for place in candidates], share)]
    return Choice(moved, peak_bytes(nbytes, wanted, kept_bytes, windows, moved), windows)


def peak_bytes(
    nbytes: Sequence[int], wanted: Sequence[int], kept_bytes: int, windows: Windows, moved: Sequence[int]
) -> int:
    """The most that saved tensors hold at once: in forward on their way out, in backward read ahead."""
    goes = set(moved)
    held = most = kept_bytes
    out: list[int] = []  # bytes under way, oldest first
    for place, each in enumerate(nbytes):
        held += each
        if place in goes:
            while out and sum(out) + each > windows.out_bytes:
                held -= out.pop(0)
            out.append(each)
        most = max(most, held)
    # What backward asks for late is read late: by then others are free.
    order = sorted(range(len(nbytes)), key=lambda place: wanted[place])
    ahead = [place for place in order if place in goes]
    held -= sum(out)
    here = 0
    for place in order:
        while ahead and (not here or here + nbytes[ahead[0]] <= windows.ahead_bytes):
            here += nbytes[ahead[0]]
            held += nbytes[ahead.pop(0)]
        most = max(most, held)
        held -= nbytes[place]
        here -= nbytes[place] if place in goes else 0
    return most
