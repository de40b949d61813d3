"""Simulate: what a step would take, in time and in memory, if a plan were carried out. Pure: facts in, figures out.

It does as the engine does. One link carries a transfer at a time: writes in the order in which they are sent, a few
storages at once; reads ahead of writes that have not begun. Forward waits where as much is in flight as may be, or
where memory is at the budget and something in flight will free it; backward waits for what has not arrived. A block
that recomputes keeps its input, and has all that it saves in memory from the moment when backward reaches it; what is
read ahead leaves room for the largest of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .facts import OUTSIDE, Facts
from .policy import planned_burst_bytes, read_burst_bytes


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
        read_bytes: read back; what is wanted while it is still on its way out is not.
        peak: the first moment at which most bytes are in memory.
        seen, carried: fields of `moments` and `transfers`, which are made when somebody looks at them.
    """

    step_s: float = 0.0
    turn_s: float = 0.0
    waited_s: float = 0.0
    replayed_s: float = 0.0
    moved_bytes: int = 0
    over_bytes: int = 0
    read_bytes: int = 0
    peak: Moment = _NOTHING
    seen: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    carried: list[tuple[str, int, float, float]] = field(default_factory=list)

    @cached_property
    def moments(self) -> list[Moment]:
        """Memory over the step."""
        return [Moment(*each) for each in self.seen]

    @cached_property
    def held_bytes(self) -> int:
        """Most bytes in memory at once beside what a block has recomputed: what the engine counts."""
        return max((kept + out + back for _, kept, out, back, _ in self.seen), default=0)

    @cached_property
    def transfers(self) -> list[Transfer]:
        """All transfers, in the order of their start."""
        return sorted((Transfer(*each) for each in self.carried), key=lambda each: each.start_s)


@dataclass(slots=True)
class _Write:
    """A write that has not ended; `in_vain`: backward has asked for its storage meanwhile."""

    number: int
    start_s: float
    end_s: float
    in_vain: bool = False


class _Way:
    """The link: writes that have not ended, in their order, and until when it is busy."""

    def __init__(self, facts: Facts, carried: list[tuple[str, int, float, float]]) -> None:
        self.writes: deque[_Write] = deque()
        self._facts = facts
        self._carried = carried
        self._free_s = 0.0
        self._reads_until_s = 0.0

    def write(self, number: int, now_s: float) -> None:
        """Queue a write."""
        start_s = max(now_s, self._free_s)
        self._free_s = start_s + self._facts.saved[number].nbytes / self._facts.link.write_bytes_per_s
        self.writes.append(_Write(number, start_s, self._free_s))

    def read(self, number: int, now_s: float) -> float:
        """Queue a read, ahead of writes that have not begun; returns when it ends."""
        start_s, later = max(now_s, self._reads_until_s), []
        while self.writes and self.writes[-1].start_s > now_s:
            later.append(self.writes.pop())
        if self.writes:
            start_s = max(start_s, self.writes[-1].end_s)
        end_s = start_s + self._facts.saved[number].nbytes / self._facts.link.read_bytes_per_s
        self._carried.append(("read", number, start_s, end_s))
        self._reads_until_s = self._free_s = end_s
        while later:
            self._again(later.pop())
        return end_s

    def keep(self, number: int, now_s: float) -> bool:
        """Let a storage stay that is on its way out: its write is cancelled, or runs in vain; False if it has gone."""
        place = next((place for place, each in enumerate(self.writes) if each.number == number), None)
        if place is None:
            return False
        found = self.writes[place]
        if found.start_s <= now_s:
            found.in_vain = True
            return True
        later = [self.writes.pop() for _ in range(len(self.writes) - place)]
        self._free_s = later.pop().start_s
        while later:
            self._again(later.pop())
        return True

    def end(self) -> _Write:
        """End the first write."""
        ended = self.writes.popleft()
        self._carried.append(("write", ended.number, ended.start_s, ended.end_s))
        return ended

    def _again(self, write: _Write) -> None:
        took_s = write.end_s - write.start_s
        write.start_s = self._free_s
        write.end_s = self._free_s = write.start_s + took_s
        self.writes.append(write)


class _Step:
    """The state of a simulated step."""

    def __init__(self, facts: Facts, limit_bytes: int) -> None:
        self.facts = facts
        self.limit_bytes = limit_bytes
        self.found = Timeline()
        self.peak_bytes = 0
        self.late_s = 0.0  # by which the computation is behind what the facts say
        self.kept = self.out = self.back = self.replayed = 0
        self.way = _Way(facts, self.found.carried)

    @property
    def nbytes(self) -> int:
        return self.kept + self.out + self.back + self.replayed

    def note(self, now_s: float) -> None:
        kept, out, back, replayed = self.kept, self.out, self.back, self.replayed
        self.found.seen.append((now_s, kept, out, back, replayed))
        nbytes = kept + out + back + replayed
        if nbytes > self.peak_bytes:
            self.peak_bytes, self.found.peak = nbytes, Moment(now_s, kept, out, back, replayed)

    def send(self, numbers: list[int], now_s: float) -> float:
        """Queue writes of what is kept, waiting for room; returns the time after it."""
        link = self.facts.link
        for number in numbers:
            nbytes = self.facts.saved[number].nbytes
            while self.way.writes and self.out + nbytes > link.in_flight_bytes:
                now_s = self.wait_for_a_write(now_s)
            self.way.write(number, now_s)
            self.kept -= nbytes
            self.out += nbytes
            self.late_s += nbytes * link.step_s_per_byte / 2
            self.found.moved_bytes += nbytes
        numbers.clear()
        return now_s

    def read(self, number: int, now_s: float) -> float:
        """Queue a read; returns when it ends."""
        nbytes = self.facts.saved[number].nbytes
        self.late_s += nbytes * self.facts.link.step_s_per_byte / 2
        self.back += nbytes
        return self.way.read(number, now_s)

    def land(self, now_s: float) -> None:
        """Free what has been written by now."""
        while self.way.writes and self.way.writes[0].end_s <= now_s:
            ended = self.way.end()
            if not ended.in_vain:
                self.out -= self.facts.saved[ended.number].nbytes
                self.note(ended.end_s)

    def wait_for_a_write(self, now_s: float) -> float:
        """Stand still until the first write that is under way has ended; returns the time after it."""
        now_s = self.wait_until(self.way.writes[0].end_s, now_s)
        self.land(now_s)
        return now_s

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
    saved = facts.saved
    moved = {index for index in moved if saved[index].place.block not in recomputed and not facts.is_late(index)}
    _forward(step, moved, recomputed)
    now_s = facts.forward_s + step.late_s
    step.land(now_s)
    step.found.turn_s = now_s
    step.note(now_s)
    _backward(step, moved, recomputed)
    found = step.found
    found.step_s = facts.step_s + step.late_s
    while step.way.writes:
        step.way.end()
    step.note(found.step_s)
    return found


def _forward(step: _Step, moved: Collection[int], recomputed: Collection[int]) -> None:
    facts, entered = step.facts, set[int]()
    going: list[int] = []
    going_bytes, left_bytes = 0, sum(facts.saved[index].nbytes for index in moved)
    burst_bytes = planned_burst_bytes(step.limit_bytes, left_bytes, facts.link.in_flight_bytes)
    for index, each in enumerate(facts.saved):
        block = each.place.block
        if block in recomputed:
            if block not in entered:
                entered.add(block)
                step.kept += facts.blocks[block].input_bytes
                now_s = facts.blocks[block].begin_s + step.late_s
                step.land(now_s)
                step.note(now_s)
                step.found.over_bytes = max(step.found.over_bytes, step.nbytes - step.limit_bytes)
            continue
        if facts.is_late(index):
            continue
        now_s = each.saved_s + step.late_s
        step.land(now_s)
        step.kept += each.nbytes
        step.note(now_s)
        if index in moved:
            going.append(index)
            going_bytes += each.nbytes
            left_bytes -= each.nbytes
        if going and (going_bytes >= burst_bytes or not left_bytes or step.nbytes > step.limit_bytes):
            now_s, going_bytes = step.send(going, now_s), 0
        while step.way.writes and step.nbytes > step.limit_bytes:
            now_s = step.wait_for_a_write(now_s)
        step.found.over_bytes = max(step.found.over_bytes, step.nbytes - step.limit_bytes)


def _backward(step: _Step, moved: Collection[int], recomputed: Collection[int]) -> None:
    facts, turn_late_s = step.facts, step.facts.forward_s
    order = facts.order_wanted
    to_read = deque(index for index in order if index in moved)
    arrives: dict[int, float] = {}  # by what has been brought; at once what was still on its way out
    used: list[int] = []  # asked for, and not freed
    replayed: set[int] = set()
    limit_bytes = step.limit_bytes - facts.replay_bytes(recomputed)  # of all but what a block has recomputed
    waiting_inputs: dict[int, int] = {b: len(facts.by_block.get(b, ())) for b in recomputed}

    def bring(now_s: float) -> None:
        number = to_read.popleft()
        if step.way.keep(number, now_s):
            nbytes = facts.saved[number].nbytes
            step.out, step.back, arrives[number] = step.out - nbytes, step.back + nbytes, now_s
        else:
            arrives[number] = step.read(number, now_s)
            step.found.read_bytes += facts.saved[number].nbytes

    def make_room(nbytes: int, budget_bytes: int) -> bool:
        """Let go of what backward has used and its graph still owns, which can be read again."""
        for number in [number for number in used[:-1] if number in arrives]:
            if step.back + nbytes <= budget_bytes:
                break
            step.back -= facts.saved[number].nbytes
            used.remove(number)
        return step.back + nbytes <= budget_bytes

    def read_ahead(now_s: float) -> None:
        """Read what is wanted next, while the last of `used` is in use."""
        if not to_read:
            return
        budget_bytes = min(limit_bytes - step.out - step.kept, facts.read_ahead_bytes)
        full = step.back and step.back + read_burst_bytes(budget_bytes) > budget_bytes
        if full and not any(number in arrives for number in used[:-1]):
            return
        while to_read and make_room(facts.saved[to_read[0]].nbytes, budget_bytes):
            bring(now_s)
        step.note(now_s)

    def free(number: int) -> None:
        each = facts.saved[number]
        if each.place.block in recomputed:
            step.replayed -= each.replayed_bytes
        elif number in arrives:
            step.back -= each.nbytes
        else:
            step.kept -= each.nbytes

    for index in order:
        each = facts.saved[index]
        block = each.place.block
        now_s = turn_late_s + each.wanted_s + step.late_s
        step.land(now_s)
        for number in used.copy():
            if not facts.saved[number].outlasts(each.wanted_s):
                used.remove(number)
                free(number)
        step.note(now_s)
        used.append(index)
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
        elif facts.is_late(index):  # held from now on, and waits for room as what forward saves
            step.kept += each.nbytes
            step.note(now_s)
            while step.way.writes and step.kept + step.out > step.limit_bytes:
                now_s = step.wait_for_a_write(now_s)
        elif index in moved:
            if index not in arrives:
                bring(now_s)  # the first that is still to be read is the first that is asked for
                step.note(now_s)
            if arrives[index] > now_s:
                read_ahead(now_s)
                now_s = step.wait_until(arrives[index], now_s)
        read_ahead(now_s)
    for number in used:
        free(number)
