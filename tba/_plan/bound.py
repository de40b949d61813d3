"""Bound: seconds that no plan can do better than, whatever it decides on each storage and block.

At the end of forward memory holds what is neither written by then nor left to be recomputed or derived. So for each
number of bytes that have gone, the rest above the budget is, by the blocks and tensors that cost least a byte and in
fractions of them; forward lasts as long as it computes or as the link writes, whichever is longer, and backward as it
computes and recomputes, or as the link reads. That is convex in the bytes gone; the least of it is a bound. So is, over
all numbers of blocks, the least that a step takes in which so many recompute, each as fast as the fastest ones and
saving as much as the largest, and in which deriving costs nothing: few blocks are coarse, and that counts them whole.
The larger of the two is told. The real step keeps storages whole, has a peak elsewhere too and reads in order: it can
only take longer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from .facts import Facts

_ROUNDS = 60  # of the search, each of which leaves two thirds of the range


def lower_bound_s(facts: Facts, budget_bytes: int) -> float:
    """Return the seconds of forward and backward that no plan within the budget can stay below."""
    excess_bytes = facts.held_bytes - budget_bytes
    if excess_bytes <= 0:
        return facts.step_s
    recompute_s = _Recompute(facts)
    high = float(min(excess_bytes, facts.most_moved_bytes))
    low = min(high, max(0.0, excess_bytes - recompute_s.most_bytes))

    def step_s(written_bytes: float) -> float:
        return least_s(facts, written_bytes, recompute_s(excess_bytes - written_bytes))

    for _ in range(_ROUNDS):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        if step_s(first) <= step_s(second):
            high = second
        else:
            low = first
    return max(min(step_s(low), step_s((low + high) / 2), step_s(high)), _whole_blocks_s(facts, excess_bytes))


def _whole_blocks_s(facts: Facts, excess_bytes: int) -> float:
    """Return the seconds that no step can stay below in which a whole number of blocks recomputes."""
    may = [number for number, block in enumerate(facts.blocks) if block.replay_s is not None]
    gains = sorted((facts.block_bytes(number) - facts.blocks[number].input_bytes for number in may), reverse=True)
    replays_s = sorted(facts.blocks[number].replay_s or 0.0 for number in may)
    missing = [max(0, excess_bytes - gained) for gained in accumulate(gains, initial=0)]
    derivable_bytes = sum(facts.saved[index].nbytes for index in facts.derivable)  # at no cost here
    missing = [max(0, each - derivable_bytes) for each in missing]
    steps = list(zip(missing, accumulate(replays_s, initial=0.0), strict=True))
    can = [each for each in steps if each[0] <= facts.most_moved_bytes]
    return min((least_s(facts, *each) for each in can), default=0.0)


def gone_bytes(facts: Facts, limit_bytes: int, recomputed: Iterable[int]) -> int:
    """Return how many bytes must have left memory by the end of forward if these blocks and parts recompute."""
    gains = (facts.held_block_bytes(number) - facts.blocks[number].input_bytes for number in recomputed)
    return max(0, facts.held_bytes - sum(gains) - limit_bytes)


def least_s(facts: Facts, written_bytes: float, replayed_s: float) -> float:
    """Return the least seconds of a step that writes so many bytes, reads them back and recomputes for so long."""
    link, spill = facts.link, facts.link.spill
    fewest = written_bytes / max(1, facts.largest_bytes)
    taken_s = (written_bytes * link.step_s_per_byte + fewest * link.step_s_per_record) / 2
    out_s, back_s = written_bytes / link.write_bytes_per_s, written_bytes / link.read_bytes_per_s
    if spill is not None:  # what host memory has no room for has been written to the disk by then
        spilled_bytes = max(0.0, written_bytes - spill.host_bytes - spill.queued_bytes)
        out_s = max(out_s, spilled_bytes / spill.write_bytes_per_s)
        back_s = max(back_s, spilled_bytes / spill.read_bytes_per_s)
    return max(facts.forward_s + taken_s, out_s) + max(facts.backward_s + taken_s + replayed_s, back_s)


class _Recompute:
    """The least seconds in which blocks and derived tensors, or fractions of them, save so many bytes."""

    def __init__(self, facts: Facts) -> None:
        gains = []
        for number, block in enumerate(facts.blocks):
            nbytes = facts.block_bytes(number) - block.input_bytes
            if block.replay_s is not None and nbytes > 0:
                gains.append((block.replay_s / nbytes, nbytes))
        for each in map(facts.saved.__getitem__, facts.derivable):
            gains.append(((each.derive_s or 0.0) / each.nbytes, each.nbytes))
        gains.sort()
        self._seconds_per_byte = [seconds for seconds, _ in gains]
        self._bytes = list(accumulate((nbytes for _, nbytes in gains), initial=0))
        self._seconds = list(accumulate((seconds * nbytes for seconds, nbytes in gains), initial=0.0))

    @property
    def most_bytes(self) -> int:
        """Bytes that all of them save."""
        return self._bytes[-1]

    def __call__(self, nbytes: float) -> float:
        place = min(bisect_right(self._bytes, nbytes), len(self._seconds_per_byte)) - 1
        if nbytes <= 0 or place < 0:
            return 0.0
        return self._seconds[place] + (nbytes - self._bytes[place]) * self._seconds_per_byte[place]
