"""Leaving: how much of what a step saves can leave the card's memory without a notable delay, in the simulated step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tba import ConfigError
from tba._forecast.hardware import Device, Disk
from tba._forecast.observe import Observed
from tba._forecast.training import training
from tba._plan.facts import Facts
from tba._plan.greedy import diffuse, make, movable
from tba._plan.plan import Plan

_DAY_S = 86400
_NO_BUDGET = 1 << 62  # forward waits for the link alone, never for memory
_GRID, _CLOSE = 32, 0.002  # shares tried first, and how near those are where the search ends


def room_bytes(observed: Observed, device: Device, optimizer: str, shards: int) -> int | None:
    """Memory of a card that is left for saved tensors; None where the rest of the training alone does not fit."""
    try:
        return training(observed, device, optimizer, shards).left(device)
    except ConfigError:
        return None


def told(plan: Plan, disk: Disk) -> dict[str, Any]:
    """What leaves and comes back, what that takes, and how long drives live with it; None for what does not wear.

    What backward asks for while it is still on its way out has not left, though it is written.
    """
    written = plan.predicted.moved_bytes / plan.predicted.step_s * _DAY_S
    years = disk.years(written)
    return {
        "share": plan.predicted.read_bytes / plan.facts.saved_bytes,
        "slowdown": plan.predicted.step_s / plan.facts.step_s,
        "written_share": plan.predicted.moved_bytes / plan.facts.saved_bytes,
        "waited_s": plan.predicted.waited_s,
        "written_bytes_per_day": written,
        "years": None if years is None or math.isinf(years) else years,
    }


class Leaving:
    """Plans of one step that move a share of what it saves, spread evenly, and recompute nothing."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        window = facts.link.in_flight_bytes
        # What is larger than all that may be on its way at once (the logits) leaves only while forward waits for it.
        small = (index for index in movable(facts, frozenset(), _NO_BUDGET) if facts.saved[index].nbytes <= window)
        self._candidates = list(small)
        self._sizes = [facts.saved[index].nbytes for index in self._candidates]

    def plan(self, share: float) -> Plan:
        """Move this share of what may move."""
        moved = frozenset(self._candidates[position] for position in diffuse(self._sizes, share))
        return make(self.facts, _NO_BUDGET, moved, frozenset())

    def most(self, slowdown: float) -> Plan:
        """Move as much as a step that takes at most `slowdown` times as long as one that keeps all."""

        def holds(plan: Plan) -> bool:
            return plan.predicted.step_s <= slowdown * self.facts.step_s

        # From above, since more may take less: what leaves evenly may fall on better places.
        for step in range(_GRID, 0, -1):
            if holds(plan := self.plan(step / _GRID)):
                return plan if step == _GRID else self._between(plan, step / _GRID, (step + 1) / _GRID, holds)
        return self._between(self.plan(0.0), 0.0, 1 / _GRID, holds)

    def least(self, memory_bytes: int) -> Plan | None:
        """Move as little as fits the memory, beside the tensor just being computed; None where nothing fits."""

        def holds(plan: Plan) -> bool:
            return plan.predicted.peak.nbytes <= memory_bytes - self.facts.largest_bytes

        if holds(nothing := self.plan(0.0)):
            return nothing
        everything = self.plan(1.0)
        return self._between(everything, 1.0, 0.0, holds) if holds(everything) else None

    def _between(self, plan: Plan, good: float, bad: float, holds: Callable[[Plan], bool]) -> Plan:
        """Go on from the plan of a share that holds towards a share that does not, as far as it holds."""
        while abs(good - bad) > _CLOSE:
            share = (good + bad) / 2
            if holds(found := self.plan(share)):
                plan, good = found, share
            else:
                bad = share
        return plan
