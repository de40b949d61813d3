"""Lane: what is known of one of several stores, and which of them the next write goes to. Pure decisions.

A write goes where it will probably end first: bytes being written, and its own, over the measured speed. A fast disk
thus gets more of them, and one that has become slow, or hangs, fewer the more it lags. A store that failed rests and is
then tried again: a full disk may have room by then.

Measured against a simpler rule (least bytes under way, in turn where those are equal), on two paths of 40 and 160 MB/s:
writing and reading back 128 MiB, 32 of them under way at once, took 1.35 times as long by that (1.19 to 1.40 in 8
interleaved rounds), 512 MiB 1.09 times; 128 MiB on paths of 60 and 120 MB/s 1.09 times; on equal ones as long.
Reads under way are not counted: where they were, reading and writing at once took as long (0.97 to 1.01 of the time).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

REST_S = 30.0  # a failed write costs little, as its tensor stays in memory; a disk comes back in minutes, if at all
# Of the past, each transfer leaves so much to the estimate of speed: it looks back over about ten.
_MEMORY = 0.9


class Ended(NamedTuple):
    """A write that is over; `moved` is False for one that was taken back or failed, `failed` for the latter."""

    at_s: float
    nbytes: int
    moved: bool
    failed: bool


class Lane:
    """One store's record. Not thread-safe, but for `ended`, to which any thread may append at any bytecode."""

    def __init__(self) -> None:
        self.ended: deque[Ended] = deque()
        self.in_flight_bytes = 0
        self.rests_until_s = float("-inf")
        self._since_s = 0.0  # the store is busy with writes since then, or since the last one ended
        self._busy_s = 0.0  # both over the recent past only
        self._moved_bytes = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """Speed while busy; None before the first write has ended."""
        return self._moved_bytes / self._busy_s if self._busy_s > 0 and self._moved_bytes else None

    def begin(self, nbytes: int, now_s: float) -> None:
        """A write is under way."""
        if not self.in_flight_bytes:
            self._since_s = now_s
        self.in_flight_bytes += nbytes

    def catch_up(self) -> None:
        """Take account of what has ended."""
        while self.ended:
            end = self.ended.popleft()
            self.in_flight_bytes -= end.nbytes
            if end.moved:
                took_s = max(0.0, end.at_s - self._since_s)
                memory = _MEMORY if took_s else 1.0  # what one call moved with the last counts as one with it
                self._busy_s = memory * self._busy_s + took_s
                self._moved_bytes = memory * self._moved_bytes + end.nbytes
                self._since_s = end.at_s
                self.rests_until_s = float("-inf")
            elif end.failed:
                self.rests_until_s = end.at_s + REST_S


def choose(lanes: Sequence[Lane], nbytes: int, now_s: float) -> int:
    """The index of the lane for a write of `nbytes`.

    Where all rest, the one whose rest ends first is tried rather than none.
    """
    for lane in lanes:
        lane.catch_up()
    awake = [index for index, lane in enumerate(lanes) if lane.rests_until_s <= now_s]
    if not awake:
        return min(range(len(lanes)), key=lambda index: lanes[index].rests_until_s)
    # One of unknown speed passes for the fastest: that is how it comes to be known.
    fastest = max((lane.bytes_per_s or 0.0 for lane in lanes), default=0.0) or 1.0

    def ends_s(index: int) -> float:
        lane = lanes[index]
        return (lane.in_flight_bytes + nbytes) / (lane.bytes_per_s or fastest)

    return min(awake, key=ends_s)
