"""Pace: what the link has been seen to carry, and how much of a step's time is its own computation.

Wants the engine's lock held.
"""

from __future__ import annotations

import math

from ..._blocks.watch import Watch
from ..._config import OffloadConfig
from ..._plan import clock
from ..._plan.facts import Link
from ..._transfer.cost import Cost

# Bytes/s of a link that has not carried enough to tell, and that no setting slows down: a disk, and PCIe.
_UNKNOWN, _UNKNOWN_ON_DEVICE = 1e9, 20e9
_LAST = 0.5  # weight of the last step in what is known of the link: others may have run beside it


class Pace:
    """Rates of the link, learned step by step.

    Attributes:
        link: None before the first step has been learned from.
    """

    def __init__(self, config: OffloadConfig, cost: Cost, in_flight_bytes: int) -> None:
        self.link: Link | None = None
        self._cost = cost
        self._in_flight_bytes = in_flight_bytes
        # A limit's own: what is carried after a rest may pass it for as long as the limit lets up.
        self._most = tuple(rate or math.inf for rate in (config.max_write_rate, config.max_read_rate))

    def learn(self, *, planned: bool, on_device: bool) -> Link:
        """Learn from the transfers of a step that has ended; `planned`: once there is a plan."""
        cost = self._cost
        seen = cost.out.bytes_per_s, cost.back.bytes_per_s
        new = *map(min, seen, self._most), cost.busy_per_byte_s
        if self.link is None:
            prior = _UNKNOWN_ON_DEVICE if on_device else _UNKNOWN
            unknown = *(min(prior, rate) for rate in self._most), 0.0
            out, back, taken = (each or guess for each, guess in zip(new, unknown, strict=True))
        else:
            link = self.link
            before = link.write_bytes_per_s, link.read_bytes_per_s, link.step_s_per_byte
            weight = _LAST if planned else 1.0  # the first step's writes have made the file grow
            out, back, taken = (
                was + weight * (each - was) if each else was for each, was in zip(new, before, strict=True)
            )
        self.link = Link(out, back, taken, self._in_flight_bytes)
        return self.link

    def at(self, seen: Watch) -> float:
        """Seconds of computation since the step began."""
        return clock.current.now_s() - seen.begun_s - self.lost_s(seen)

    def lost_s(self, seen: Watch) -> float:
        """Seconds of the step that it has waited, that trials took, and that transfers have taken from it."""
        cost = self._cost
        taken_s = cost.nbytes * self.link.step_s_per_byte / 2 if self.link is not None else 0.0
        return cost.waited_s + seen.aside_s + taken_s
