"""Simulate: what a step would take, in time and in memory, if a plan were carried out. Pure: facts in, figures out.

It does as the engine does. One link carries a transfer at a time: writes in the order in which they are sent, a few
storages at once; reads ahead of writes that have not begun. Forward waits where as much is in flight as may be, or
where memory is at the budget and something in flight will free it; backward waits for what has not arrived. A block
that recomputes keeps its input, and has all that it saves in memory from the moment when backward reaches it; what is
read ahead leaves room for the largest of them.

A device's link leads to host memory. The host launches ahead of the device, so in forward it hears that a write has
ended when it waits for it, not before: however fast the link is, memory fills up to the budget.

Where host memory is full what was written first, which backward wants last, goes on to a disk; forward waits where more
waits for that than may. What has gone to the disk is read from there first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .._memory.ledger import held_limit_bytes, read_limit_bytes
from .facts import Facts, Place, Spill
from .policy import planned_burst_bytes, read_burst_bytes


class Transfer(NamedTuple):
    """One simulated transfer of saved storage `number`; seconds from the begin of the step."""

    kind: str  # "write" or "read" on the link, "spill" or "fetch" on the disk beneath host memory
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
        spilled_bytes: of them, written to a disk beneath host memory.
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
    spilled_bytes: int = 0
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


class _Host:
    """Host memory at the other end of a device's link, what it holds in order of arrival, and the disk beneath it."""

    def __init__(self, spill: Spill, carried: list[tuple[str, int, float, float]]) -> None:
        self.spilled_bytes = 0
        self._spill = spill
        self._carried = carried
        self._nbytes = 0
        self._kept: deque[tuple[int, int, float]] = deque()  # number, bytes, and when it is there
        self._waiting: deque[tuple[int, float]] = deque()  # bytes on their way here, and when there is room for them
        self._waiting_bytes = 0
        self._spilled: dict[int, tuple[float, float]] = {}  # when each was written to the disk
        self._free_s = self._reads_until_s = 0.0  # of the disk

    def take(self, number: int, nbytes: int, copied_s: float) -> None:
        """Take what will have been copied by then. The oldest makes way for it."""
        there_s = copied_s
        if nbytes > self._spill.host_bytes:
            there_s = self._to_disk(number, nbytes, copied_s)
        else:
            while self._nbytes + nbytes > self._spill.host_bytes:
                oldest, oldest_bytes, since_s = self._kept.popleft()
                self._nbytes -= oldest_bytes
                there_s = self._to_disk(oldest, oldest_bytes, max(copied_s, since_s))
            if self._waiting:  # what it displaces may be one of a larger one's still
                there_s = max(there_s, self._waiting[-1][1])
            self._kept.append((number, nbytes, there_s))
            self._nbytes += nbytes
        self._waiting.append((nbytes, there_s))
        self._waiting_bytes += nbytes

    def _to_disk(self, number: int, nbytes: int, at_s: float) -> float:
        begin_s = max(self._free_s, at_s)
        self._free_s = begin_s + nbytes / self._spill.write_bytes_per_s
        self._spilled[number] = begin_s, self._free_s
        self._carried.append(("spill", number, begin_s, self._free_s))
        self.spilled_bytes += nbytes
        return self._free_s

    def forget(self, number: int) -> None:
        """Forget a storage that stays where it was after all."""
        for place, (kept, nbytes, _) in enumerate(self._kept):
            if kept == number:
                del self._kept[place]
                self._nbytes -= nbytes
                return

    def has_room_at(self, nbytes: int) -> float:
        """Return when so many bytes more may be on their way: a host that is ahead of its device waits for that."""
        room_s = 0.0
        while self._waiting and self._waiting_bytes + nbytes > self._spill.queued_bytes:
            each, room_s = self._waiting.popleft()
            self._waiting_bytes -= each
        return room_s

    def give(self, number: int, nbytes: int, now_s: float) -> float:
        """Return when a storage is in host memory, which asks the disk for it if it has gone there."""
        began_s, ended_s = self._spilled.get(number, (now_s, now_s))
        if now_s <= ended_s:  # until then it is in host memory as well
            if began_s > now_s:
                del self._spilled[number]
                self.spilled_bytes -= nbytes
            return now_s
        begin_s = max(now_s, self._reads_until_s)
        for began_s, ended_s in self._spilled.values():
            if began_s <= now_s < ended_s:  # under way: reads go ahead of others
                begin_s = max(begin_s, ended_s)
        self._reads_until_s = begin_s + nbytes / self._spill.read_bytes_per_s
        self._carried.append(("fetch", number, begin_s, self._reads_until_s))
        return self._reads_until_s


class _Way:
    """The link: writes that have not ended, in their order, and until when it is busy; `host`: where it leads to."""

    def __init__(self, facts: Facts, carried: list[tuple[str, int, float, float]]) -> None:
        self.writes: deque[_Write] = deque()
        self._facts = facts
        self._carried = carried
        self._free_s = 0.0
        self._reads_until_s = 0.0
        spill = facts.link.spill
        self.host = None if spill is None else _Host(spill, carried)

    def write(self, number: int, now_s: float) -> None:
        """Queue a write."""
        start_s = max(now_s, self._free_s)
        nbytes = self._facts.saved[number].nbytes
        self._free_s = start_s + nbytes / self._facts.link.write_bytes_per_s
        self.writes.append(_Write(number, start_s, self._free_s))
        if self.host is not None:
            self.host.take(number, nbytes, self._free_s)

    def read(self, number: int, now_s: float) -> float:
        """Queue a read, ahead of writes that have not begun; returns when it ends."""
        nbytes = self._facts.saved[number].nbytes
        there_s = now_s if self.host is None else self.host.give(number, nbytes, now_s)
        start_s, later = max(there_s, self._reads_until_s), []
        while self.writes and self.writes[-1].start_s > now_s:
            later.append(self.writes.pop())
        if self.writes:
            start_s = max(start_s, self.writes[-1].end_s)
        end_s = start_s + nbytes / self._facts.link.read_bytes_per_s
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
        if self.host is not None:
            self.host.forget(number)
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

    def taken_s(self, nbytes: int) -> float:
        """Seconds that a storage takes from the computation to go out, or to come back."""
        link = self.facts.link
        return (nbytes * link.step_s_per_byte + link.step_s_per_record) / 2

    def send(self, numbers: list[int], now_s: float) -> float:
        """Queue writes of what is kept, waiting for room; returns the time after it."""
        link = self.facts.link
        for number in numbers:
            nbytes = self.facts.saved[number].nbytes
            while self.way.writes and self.out + nbytes > link.in_flight_bytes:
                now_s = self.wait_for_a_write(now_s)
            if self.way.host is not None:
                room_s = self.way.host.has_room_at(nbytes)
                now_s = self.wait_until(room_s, now_s)
                self.land(room_s)
            self.way.write(number, now_s)
            self.kept -= nbytes
            self.out += nbytes
            self.late_s += self.taken_s(nbytes)
            self.found.moved_bytes += nbytes
        numbers.clear()
        return now_s

    def read(self, number: int, now_s: float) -> float:
        """Queue a read; returns when it ends."""
        nbytes = self.facts.saved[number].nbytes
        self.late_s += self.taken_s(nbytes)
        self.back += nbytes
        return self.way.read(number, now_s)

    def land(self, now_s: float) -> None:
        """Free what has been written by now."""
        while self.way.writes and self.way.writes[0].end_s <= now_s:
            ended = self.way.end()
            if not ended.in_vain:
                self.out -= self.facts.saved[ended.number].nbytes
                self.note(max(ended.end_s, self.found.seen[-1][0]))

    def catch_up(self, now_s: float) -> None:
        """Free what has been written by now, unless the host is ahead of a device and has not heard of it."""
        if self.way.host is None:
            self.land(now_s)

    def wait_for_a_write(self, now_s: float) -> float:
        """Stand still until the first write that is under way has ended; returns the time after it."""
        end_s = self.way.writes[0].end_s
        now_s = self.wait_until(end_s, now_s)
        self.land(now_s if self.way.host is None else end_s)
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
        moved: indices in `facts.saved`; of blocks that recompute they mean nothing, but those of `facts.inputs`.
        recomputed: indices in `facts.blocks`, no part of a block together with that.
        budget_bytes: of memory, at which forward waits, if waiting helps.
    """
    facts, moved = facts.saving_inputs(moved, recomputed)
    step = _Step(facts, held_limit_bytes(budget_bytes, facts.largest_bytes))
    saved = facts.saved
    again = facts.again(recomputed)
    moved = {index for index in moved if saved[index].place not in again and not facts.is_late(index)}
    _forward(step, moved, again)
    now_s = facts.forward_s + step.late_s
    step.land(now_s)
    step.found.turn_s = now_s
    step.note(now_s)
    _Backward(step, moved, recomputed, again).run()
    found = step.found
    found.step_s = facts.step_s + step.late_s
    while step.way.writes:
        step.way.end()
    if step.way.host is not None:
        found.spilled_bytes = step.way.host.spilled_bytes
    step.note(found.step_s)
    return found


def _forward(step: _Step, moved: Collection[int], again: Mapping[Place, int]) -> None:
    facts, entered = step.facts, set[int]()
    going: list[int] = []
    going_bytes, left_bytes = 0, sum(facts.saved[index].nbytes for index in moved)
    link = facts.link
    burst_bytes = planned_burst_bytes(step.limit_bytes, left_bytes, link.in_flight_bytes, link.write_bytes_per_s)
    for index, each in enumerate(facts.saved):
        if (block := again.get(each.place)) is not None:
            if block not in entered:
                entered.add(block)
                step.kept += facts.blocks[block].input_bytes
                now_s = facts.blocks[block].begin_s + step.late_s
                step.catch_up(now_s)
                step.note(now_s)
                step.found.over_bytes = max(step.found.over_bytes, step.nbytes - step.limit_bytes)
            continue
        if facts.is_late(index):
            continue
        now_s = each.saved_s + step.late_s
        step.catch_up(now_s)
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


class _Backward:
    """The backward of a simulated step."""

    def __init__(
        self, step: _Step, moved: Collection[int], recomputed: Collection[int], again: Mapping[Place, int]
    ) -> None:
        facts = step.facts
        self._step, self._facts = step, facts
        self._moved, self._again = moved, again
        self._to_read = deque(index for index in facts.order_wanted if index in moved)
        self._arrives: dict[int, float] = {}  # by what has been brought; at once what was still on its way out
        self._used: list[int] = []  # asked for, and not freed
        self._replayed: set[int] = set()
        self._replay_bytes = facts.replay_bytes(recomputed)
        self._waiting: dict[int, int] = {block: len(facts.by_block.get(block, ())) for block in recomputed}

    def run(self) -> None:
        """Ask for all that was saved."""
        step, facts = self._step, self._facts
        for index in facts.order_wanted:
            each = facts.saved[index]
            now_s = facts.forward_s + each.wanted_s + step.late_s
            step.land(now_s)
            for number in self._used.copy():
                if not facts.saved[number].outlasts(each.wanted_s):
                    self._used.remove(number)
                    self._free(number)
            step.note(now_s)
            self._used.append(index)
            if (block := self._again.get(each.place)) is not None:
                self._replay(block, now_s)
            elif facts.is_late(index):  # held from now on, and waits for room as what forward saves
                step.kept += each.nbytes
                step.note(now_s)
                while step.way.writes and step.kept + step.out > step.limit_bytes:
                    now_s = step.wait_for_a_write(now_s)
            elif index in self._moved:
                now_s = self._await(index, now_s)
            self._read_ahead(now_s)
        for number in self._used:
            self._free(number)

    def _replay(self, block: int, now_s: float) -> None:
        """Run a block again where backward asks for the first of it; free its input with the last."""
        step, facts = self._step, self._facts
        if block not in self._replayed:
            self._replayed.add(block)
            replay_s = facts.blocks[block].replay_s or 0.0
            step.late_s += replay_s
            step.found.replayed_s += replay_s
            step.replayed += facts.replayed_bytes(block)
            step.note(now_s)
        self._waiting[block] -= 1
        if not self._waiting[block]:
            step.kept -= facts.blocks[block].input_bytes

    def _await(self, index: int, now_s: float) -> float:
        """Stand still until a storage that has gone is back; returns the time after it."""
        if index not in self._arrives:
            self._bring(now_s)  # the first that is still to be read is the first that is asked for
            self._step.note(now_s)
        if self._arrives[index] > now_s:
            self._read_ahead(now_s)
            now_s = self._step.wait_until(self._arrives[index], now_s)
        return now_s

    def _read_ahead(self, now_s: float) -> None:
        """Read what is wanted next, while what was asked for last is in use."""
        if not self._to_read:
            return
        step, facts = self._step, self._facts
        limit_bytes = read_limit_bytes(step.limit_bytes, self._replay_bytes, step.kept, step.out)
        budget_bytes = min(limit_bytes, facts.read_ahead_bytes)
        full = step.back and step.back + read_burst_bytes(budget_bytes) > budget_bytes
        if full and not any(number in self._arrives for number in self._used[:-1]):
            return
        while self._to_read and self._make_room(facts.saved[self._to_read[0]].nbytes, budget_bytes):
            self._bring(now_s)
        step.note(now_s)

    def _bring(self, now_s: float) -> None:
        step, number = self._step, self._to_read.popleft()
        nbytes = self._facts.saved[number].nbytes
        if step.way.keep(number, now_s):
            step.out, step.back, self._arrives[number] = step.out - nbytes, step.back + nbytes, now_s
        else:
            self._arrives[number] = step.read(number, now_s)
            step.found.read_bytes += nbytes

    def _make_room(self, nbytes: int, budget_bytes: int) -> bool:
        """Let go of what backward has used and its graph still owns, which can be read again."""
        step = self._step
        for number in [number for number in self._used[:-1] if number in self._arrives]:
            if step.back + nbytes <= budget_bytes:
                break
            step.back -= self._facts.saved[number].nbytes
            self._used.remove(number)
        return step.back + nbytes <= budget_bytes

    def _free(self, number: int) -> None:
        each, step = self._facts.saved[number], self._step
        if each.place in self._again:
            step.replayed -= each.replayed_bytes
        elif number in self._arrives:
            step.back -= each.nbytes
        else:
            step.kept -= each.nbytes
