"""Choice: which saved tensors of a compiled graph move, as pure functions of their bytes and order.

A budget is met by moving just enough, spread evenly over the step, so that writes begin with the first layer and reads
keep an even pace. What backward wants before a write would be done stays.

A graph can be split in several ways: some save less and compute more in backward. Of those that meet the budget, the
one is taken that costs the step least: by its operations, by the bytes it moves, and by what it waits for a slow link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .._memory.limits import Limits, read_ahead_bytes, window_bytes
from .._plan.greedy import diffuse

TOKEN_BYTES = 8  # of a token, which is saved instead of a tensor that moves


class Windows(NamedTuple):
    """Most bytes of what moves that are in memory: on their way out, held for the turn to backward, read ahead."""

    out_bytes: int
    hold_bytes: int
    ahead_bytes: int


class Lifetimes(NamedTuple):
    """What a graph saves and computes again, and when backward has it in memory.

    Attributes:
        nbytes: of each saved tensor that can move, in the order of forward.
        wanted, released: the places in backward of its first and its last use.
        kept_bytes: of what cannot move.
        again: bytes of what backward computes again that are held at each of its places; empty for none.
        token_bytes: that stay of each one that moves.
    """

    nbytes: Sequence[int]
    wanted: Sequence[int]
    released: Sequence[int]
    kept_bytes: int
    again: Sequence[int] = ()
    token_bytes: int = 0


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
        peak_bytes: the most that saved tensors, and what is computed again, hold in memory at once.
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


def choose(lives: Lifetimes, budget_bytes: int | None, limits: Limits) -> Choice:
    """Choose what moves.

    Args:
        lives: of what the graph saves and computes again.
        budget_bytes: for all of it; None to move whatever is worth it.
        limits: of transfers.
    """
    largest_bytes = max(lives.nbytes, default=0)
    windows = windows_of(limits, largest_bytes)
    if budget_bytes is None:
        return _moving(lives, windows, 1.0)
    whole = Choice([], peak_bytes(lives, windows, []), windows)
    if whole.peak_bytes <= budget_bytes:
        return whole
    # Each window gets a share of a small budget: one tensor has to fit each of them.
    share_bytes = max(largest_bytes, budget_bytes // 6)
    windows = Windows(*(min(window, share_bytes) for window in windows))
    choices = (_moving(lives, windows, share / 16) for share in range(1, 17))
    best = whole
    for choice in choices:
        best = min(best, choice, key=lambda each: each.peak_bytes)
        if best.peak_bytes <= budget_bytes:
            return best
    return best


def _moving(lives: Lifetimes, windows: Windows, share: float) -> Choice:
    """Move a share of what is not wanted as backward begins."""
    nbytes = lives.nbytes
    held_bytes, free = 0, set(range(len(nbytes)))
    for place in sorted(free, key=lambda place: lives.wanted[place]):
        if held_bytes + nbytes[place] > windows.hold_bytes:
            break
        held_bytes += nbytes[place]
        free.discard(place)
    candidates = sorted(free)
    moved = [candidates[place] for place in diffuse([nbytes[place] for place in candidates], share)]
    return Choice(moved, peak_bytes(lives, windows, moved), windows)


def peak_bytes(lives: Lifetimes, windows: Windows, moved: Sequence[int]) -> int:
    """The most that a graph may hold at once: what stays, what is on its way, what backward computes again.

    The compiler orders kernels as it likes, so what stays counts whole beside the fullest window of either way. It is
    let go of in the order of the graph only where it makes room for what is computed again.
    """
    nbytes = lives.nbytes
    out_bytes = _fullest([nbytes[place] for place in sorted(moved)], windows.out_bytes)
    order = sorted(moved, key=lambda place: lives.wanted[place])
    ahead_bytes = _fullest([nbytes[place] for place in order], windows.ahead_bytes)
    stays = set(range(len(nbytes))) - set(moved)
    held_bytes = lives.kept_bytes + sum(nbytes[place] for place in stays) + lives.token_bytes * len(moved)
    most = held_bytes + max(out_bytes, ahead_bytes)
    freed = [0] * len(lives.again)
    for place in stays:
        if lives.released[place] < len(freed):
            freed[lives.released[place]] += nbytes[place]
    for again_bytes, freed_bytes in zip(lives.again, freed, strict=True):
        most = max(most, held_bytes + ahead_bytes + again_bytes)
        held_bytes -= freed_bytes
    return most


def _fullest(sizes: Sequence[int], window_bytes: int) -> int:
    """The most bytes that are in a window at once through which tensors go in turn; one larger than it goes alone."""
    within: deque[int] = deque()
    held = most = 0
    for nbytes in sizes:
        while within and held + nbytes > window_bytes:
            held -= within.popleft()
        within.append(nbytes)
        held += nbytes
        most = max(most, held)
    return most
