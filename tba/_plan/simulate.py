"""Simulate: what a step would take, in time and in memory, if a plan were carried out. Pure: facts in, figures out.

One link carries a transfer at a time, first come, first served. Forward waits where as much is in flight as may be, or
where memory is at the budget and something in flight will free it; backward waits for what has not arrived. A saved
storage is freed when backward has asked for the next one. A block that recomputes keeps its input, and has all that it
saves in memory from the moment when backward reaches it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from .facts import OUTSIDE, Facts


class Transfer(NamedTuple):
    """One simulated transfer of saved storage `number`; seconds from the begin of the step."""

    kind: str  # "write" or "read"
    number: int
    start_s: float
    end_s: float


class Moment(NamedTuple):
    """Bytes in memory from `at_s` on: kept, on their way out, read ahead, and of a block that has recomputed."""

    at_s: float
    kept_bytes: int
    out_bytes: int
    back_bytes: int
    replayed_bytes: int

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.kept_bytes + self.out_bytes + self.back_bytes + self.replayed_bytes


_NOTHING = Moment(0.0, 0, 0, 0, 0)


@dataclass
class Timeline:
    """What a simulated step does.

    Attributes:
        step_s: seconds that it takes.
        turn_s: seconds until backward begins.
        waited_s: of them that forward and backward stand still for transfers.
        replayed_s: of them that blocks run again.
        moved_bytes: written.
        over_bytes: most bytes above what the budget leaves beside the tensor being computed, when no wait would help.
        read_bytes: read back; what is asked for while it is still on its way out is not.
        peak: the first moment at which most bytes are in memory.
        moments: memory over the step.
        transfers: in the order of their start.
    """

    step_s: float = 0.0
    turn_s: float = 0.0
    waited_s: float = 0.0
    replayed_s: float = 0.0
    moved_bytes: int = 0
    over_bytes: int = 0
    read_bytes: int = 0
    peak: Moment = _NOTHING
    moments: list[Moment] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)


class _Step:
    """The state of a simulated step."""

    def __init__(self, facts: Facts, budget_bytes: int) -> None:
        self.facts = facts
        self.budget_bytes = budget_bytes
        self.found = Timeline()
        self.peak_bytes = 0
        self.late_s = 0.0  # by which the computation is behind what the facts say
        self.kept = self.out = self.back = self.replayed = 0
        self.link_free_s = 0.0
        self.in_flight: deque[tuple[float, int]] = deque()  # end, index

    @property
    def nbytes(self) -> int:
        return self.kept + self.out + self.back + self.replayed

    def note(self, now_s: float) -> None:
        moment = Moment(now_s, self.kept, self.out, self.back, self.replayed)
        self.found.moments.append(moment)
        if self.nbytes > self.peak_bytes:
            self.peak_bytes, self.found.peak = self.nbytes, moment

    def transfer(self, kind: str, index: int, now_s: float) -> float:
        """Put a transfer on the link; returns when it ends."""
        link, nbytes = self.facts.link, self.facts.saved[index].nbytes
        rate = link.write_bytes_per_s if kind == "write" else link.read_bytes_per_s
        start_s = max(now_s, self.link_free_s)
        self.link_free_s = start_s + nbytes / rate
        self.late_s += nbytes * link.step_s_per_byte / 2
        self.found.transfers.append(Transfer(kind, index, start_s, self.link_free_s))
        return self.link_free_s

    def land(self, now_s: float) -> None:
        """Free what has been written by now."""
        while self.in_flight and self.in_flight[0][0] <= now_s:
            end_s, index = self.in_flight.popleft()
            self.out -= self.facts.saved[index].nbytes
            self.note(end_s)

    def wait_until(self, then_s: float, now_s: float) -> float:
        """Stand still; returns the time after it."""
        if then_s > now_s:
            self.late_s += then_s - now_s
            self.found.waited_s += then_s - now_s
            return then_s
        return now_s


def simulate(
    facts: Facts, moved: Collection[int], recomputed: Collection[int], budget_bytes: int = 1 << 62
) -> Timeline:
    """Simulate a step in which the storages `moved` go out and back, and the blocks `recomputed` run again.

    Args:
        moved: indices in `facts.saved`; of blocks that recompute they mean nothing.
        recomputed: indices in `facts.blocks`.
        budget_bytes: of memory, at which forward waits, if waiting helps.
    """
    step = _Step(facts, budget_bytes - facts.largest_bytes)
    _forward(step, moved, recomputed)
    now_s = facts.forward_s + step.late_s
    step.land(now_s)
    step.found.turn_s = now_s
    step.note(now_s)
    _backward(step, moved, recomputed)
    found = step.found
    found.step_s = facts.step_s + step.late_s
    step.note(found.step_s)
    return found


def _forward(step: _Step, moved: Collection[int], recomputed: Collection[int]) -> None:
    facts, link = step.facts, step.facts.link
    entered: set[int] = set()
    for index, each in enumerate(facts.saved):
        block = each.place.block
        if block in recomputed:
            if block not in entered:
                entered.add(block)
                step.kept += facts.blocks[block].input_bytes
                now_s = facts.blocks[block].begin_s + step.late_s
                step.land(now_s)
                step.note(now_s)
                step.found.over_bytes = max(step.found.over_bytes, step.nbytes - step.budget_bytes)
            continue
        now_s = each.saved_s + step.late_s
        step.land(now_s)
        if index not in moved:
            step.kept += each.nbytes
        else:
            while step.in_flight and step.out + each.nbytes > link.in_flight_bytes:
                now_s = step.wait_until(step.in_flight[0][0], now_s)
                step.land(now_s)
            step.out += each.nbytes
            step.in_flight.append((step.transfer("write", index, now_s), index))
            step.found.moved_bytes += each.nbytes
        step.note(now_s)
        while step.in_flight and step.nbytes > step.budget_bytes:
            now_s = step.wait_until(step.in_flight[0][0], now_s)
            step.land(now_s)
        step.found.over_bytes = max(step.found.over_bytes, step.nbytes - step.budget_bytes)


def _backward(step: _Step, moved: Collection[int], recomputed: Collection[int]) -> None:
    facts, turn_late_s = step.facts, step.facts.forward_s
    order = facts.order_wanted
    to_read = deque(i for i in order if i in moved and facts.saved[i].place.block not in recomputed)
    reading: dict[int, float] = {}  # when each that is read ahead arrives
    stayed: set[int] = set()  # moved, but asked for while still on the way out
    used: int | None = None
    replayed: set[int] = set()
    waiting_inputs: dict[int, int] = {b: len(facts.by_block.get(b, ())) for b in recomputed}

    def read_ahead(now_s: float) -> None:
        while to_read:
            nbytes = facts.saved[to_read[0]].nbytes
            if step.back and step.back + nbytes > facts.read_ahead_bytes:
                return
            if step.nbytes + nbytes > step.budget_bytes:
                return
            index = to_read.popleft()
            if _stays(step, index):
                stayed.add(index)
            else:
                reading[index] = step.transfer("read", index, now_s)
                step.back += nbytes

    for index in order:
        each = facts.saved[index]
        block = each.place.block
        now_s = turn_late_s + each.wanted_s + step.late_s
        step.land(now_s)
        if used is not None:
            _free(step, used, moved, recomputed, reading)
            step.note(now_s)
        if block != OUTSIDE and block in recomputed:
            if block not in replayed:
                replayed.add(block)
                replay_s = facts.blocks[block].replay_s or 0.0
                step.late_s += replay_s
                step.found.replayed_s += replay_s
                step.replayed += facts.replayed_bytes(block)
                step.note(now_s)
            waiting_inputs[block] -= 1
            if not waiting_inputs[block]:
                step.kept -= facts.blocks[block].input_bytes
        elif index in moved:
            if index not in reading and index not in stayed:
                to_read.popleft()  # the first that is still to be read is the first that is asked for
                if not _stays(step, index):
                    reading[index] = step.transfer("read", index, now_s)
                    step.back += each.nbytes
            if index in reading:
                now_s = step.wait_until(reading[index], now_s)
                step.found.read_bytes += each.nbytes
            step.note(now_s)
        used = index
        read_ahead(now_s)
    if used is not None:
        _free(step, used, moved, recomputed, reading)


def _stays(step: _Step, index: int) -> bool:
    """Keep a storage that is still on its way out; False if it has gone."""
    for place, (_, other) in enumerate(step.in_flight):
        if other == index:
            del step.in_flight[place]
            nbytes = step.facts.saved[index].nbytes
            step.out -= nbytes
            step.kept += nbytes
            return True
    return False


def _free(
    step: _Step, index: int, moved: Collection[int], recomputed: Collection[int], reading: dict[int, float]
) -> None:
    """Free a storage that backward has used."""
    each = step.facts.saved[index]
    if each.place.block in recomputed:
        step.replayed -= each.replayed_bytes
    elif index in reading:
        step.back -= each.nbytes
    else:
        step.kept -= each.nbytes
