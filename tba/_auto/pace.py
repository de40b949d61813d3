"""Pace: what the link has been seen to carry, and how much of a step's time is its own computation.

Wants the engine's lock held.
"""

from __future__ import annotations

import math

from .._blocks.watch import Watch
from .._config import OffloadConfig
from .._plan import clock
from .._plan.facts import Facts, Link, Spill
from .._transfer.build import host_shares
from .._transfer.cost import Cost, Way
from .price import LAST, Price

# Bytes/s of a link that has not carried enough to tell, and that no setting slows down: a disk, and PCIe.
_UNKNOWN, _UNKNOWN_ON_DEVICE = 1e9, 20e9
_LEAST_OWN = 0.1  # of a step that is its own computation: that of a tiny model is mostly hooks


class Pace:
    """Rates of the link, learned step by step.

    Attributes:
        link: None before the first step has been learned from.
    """

    def __init__(self, config: OffloadConfig, cost: Cost, in_flight_bytes: int) -> None:
        self.link: Link | None = None
        self._cost = cost
        self._in_flight_bytes = in_flight_bytes
        self._bytes, self._records = Price(), Price()
        self._shares = host_shares(config)
        # A limit's own: what is carried after a rest may pass it for as long as the limit lets up.
        self._most = config.max_write_rate or math.inf, config.max_read_rate or math.inf

    def learn(self, *, planned: bool, on_device: bool) -> Link:
        """Learn from the transfers of a step that has ended; `planned`: once there is a plan."""
        cost, link = self._cost, self.link
        weight = LAST if planned else 1.0  # the first step's writes have made the file grow
        if on_device:
            rates = _rates((cost.out, cost.back), link, _UNKNOWN_ON_DEVICE, (math.inf, math.inf), weight)
            disk = cost.disk_out, cost.disk_back
            below = _rates(disk, None if link is None else link.spill, _UNKNOWN, self._most, weight)
            spill = Spill(*self._shares, *below)
        else:
            rates, spill = _rates((cost.out, cost.back), link, _UNKNOWN, self._most, weight), None
        taken = self._bytes.learn(cost.busy_per_byte_s, cost.nbytes, planned=planned)
        hooks = self._records.learn(cost.per_record_s, cost.records, planned=planned)
        self.link = Link(*rates, taken, self._in_flight_bytes, spill, hooks)
        return self.link

    def at(self, seen: Watch) -> float:
        """Seconds of computation since the step began."""
        return clock.current.now_s() - seen.begun_s - self.lost_s(seen)

    def lost_s(self, seen: Watch) -> float:
        """Seconds of the step that it has waited, that trials took, and that transfers have taken from it."""
        return self._cost.waited_s + seen.aside_s + self._cost.taken_s


def without_hooks(facts: Facts, hooks_s: float) -> Facts:
    """Return the facts of a step in which hooks took so long, without that time: few storages have records by a plan.

    It was spread over the step, as what is saved is.
    """
    step_s = facts.step_s
    return facts.scaled(max(_LEAST_OWN, 1 - hooks_s / step_s), replay_ratio=1.0) if hooks_s and step_s else facts


def _rates(
    seen: tuple[Way, Way], known: Link | Spill | None, prior: float, most: tuple[float, float], weight: float
) -> tuple[float, float]:
    """Return the rates of writes and reads by what was carried in a step and what was known before, or by a prior."""
    before = (None, None) if known is None else (known.write_bytes_per_s, known.read_bytes_per_s)

    def rate(way: Way, was: float | None, limit: float) -> float:
        new = min(way.bytes_per_s, limit)  # 0: too little was carried to tell
        if was is None:
            return new or min(prior, limit)
        return was + weight * (new - was) if new else was

    out, back = map(rate, seen, before, most)
    return out, back
