"""Lane: what is known of one of several stores; and the choice of the store for the next write. Pure decisions.

A write goes where it will probably end first: (bytes being written + its own) / measured speed. So a fast disk gets
more bytes, and one that has become slow or hangs gets fewer. A store that failed rests and is then tried again: a full
disk may have room by then.

Compared with fewest bytes in flight, taking turns on ties, on two paths of 40 and 160 MB/s: that rule took 1.35 times
as long to write and read back 128 MiB with 32 MiB in flight (1.19 to 1.40 in 8 interleaved rounds), and 1.09 times for
512 MiB; 1.09 times for 128 MiB on paths of 60 and 120 MB/s; as long on equal ones. Counting reads in flight too changed
nothing (0.97 to 1.01 of the time for simultaneous reads and writes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

REST_S = 30.0  # a failed write costs little, as its tensor stays in memory; a disk recovers in minutes, if at all
_MEMORY = 0.9  # decay of the speed estimate per transfer: it looks back over about ten


class Ended(NamedTuple):
    """A write that has ended. `moved`: it succeeded; `failed`: it failed; neither: it was cancelled."""

    at_s: float
    nbytes: int
    moved: bool
    failed: bool


class Lane:
    """One store's record. Not thread-safe, but any thread may append to `ended` at any bytecode."""

    def __init__(self) -> None:
        self.ended: deque[Ended] = deque()
        self.in_flight_bytes = 0
        self.rests_until_s = float("-inf")
        self._since_s = 0.0  # when the oldest write in flight began, or the last one ended
        self._busy_s = self._moved_bytes = 0.0  # over the recent past

    @property
    def bytes_per_s(self) -> float | None:
        """Speed while busy; None before the first write has ended."""
        return self._moved_bytes / self._busy_s if self._busy_s > 0 and self._moved_bytes else None

    def begin(self, nbytes: int, now_s: float) -> None:
        if not self.in_flight_bytes:
            self._since_s = now_s
        self.in_flight_bytes += nbytes

    def catch_up(self) -> None:
        while self.ended:
            end = self.ended.popleft()
            self.in_flight_bytes -= end.nbytes
            if end.moved:
                took_s = max(0.0, end.at_s - self._since_s)
                memory = _MEMORY if took_s else 1.0  # writes moved by one call count as one
                self._busy_s = memory * self._busy_s + took_s
                self._moved_bytes = memory * self._moved_bytes + end.nbytes
                self._since_s = end.at_s
                self.rests_until_s = float("-inf")
            elif end.failed:
                self.rests_until_s = end.at_s + REST_S


def choose(lanes: Sequence[Lane], nbytes: int, now_s: float) -> int:
    """Index of the lane for a write of `nbytes`. If all rest, it is the lane whose rest ends first."""
    for lane in lanes:
        lane.catch_up()
    awake = [index for index, lane in enumerate(lanes) if lane.rests_until_s <= now_s]
    if not awake:
        return min(range(len(lanes)), key=lambda index: lanes[index].rests_until_s)
    # A lane of unknown speed counts as the fastest, so it gets measured.
    fastest = max((lane.bytes_per_s or 0.0 for lane in lanes), default=0.0) or 1.0

    def ends_s(index: int) -> float:
        lane = lanes[index]
        return (lane.in_flight_bytes + nbytes) / (lane.bytes_per_s or fastest)

    return min(awake, key=ends_s)
