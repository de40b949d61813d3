"""Read-ahead: which records backward has, or will soon have, in memory, within a budget of bytes.

Guarantees: read-ahead starts only while everything counted here fits the budget (a single record larger than the
budget is read when it is asked for); what backward has used up and its graph still owns (`retain_graph`) counts too
and is the first to go: dropped where the store has it, written after all where it does not.

Wants the engine's lock held.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict, deque

from io_backends import interrupts

from .._auto.execution import Execution
from .._memory import shortage
from .._plan.policy import read_burst_bytes
from .._plan.read_order import Orders, Walk
from .._record.record import (
    DERIVED,
    IN_MEMORY,
    PENDING,
    POISONED,
    READING,
    RESIDENT,
    RESTORED,
    STORED,
    WRITING,
    Record,
    Remains,
)
from .._transfer.mover import Mover
from .pending import Pending
from .write_behind import WriteBehind

_NOTHING_LACKS = 1 << 62
_MAX_WALKS = 16  # backward passes that may run interleaved (threads, pipeline stages) and still be told apart


class ReadAhead:
    """Read-ahead and eviction along the learned order.

    Attributes:
        records: all live ones, by number, ascending.
        remains: where records append themselves when they die.
    """

    def __init__(
        self, *, mover: Mover, write_behind: WriteBehind, pending: Pending, execution: Execution | None
    ) -> None:
        self.records: OrderedDict[int, weakref.ref[Record]] = OrderedDict()  # the oldest is found at once, always
        self.remains: deque[Remains] = deque()
        self._next_at_bytes = _NOTHING_LACKS  # in memory, at which more can be read
        self._mover = mover
        self._write_behind = write_behind
        self._ledger = write_behind.ledger
        self._pending = pending
        self._execution = execution
        self._orders = Orders()
        self._walks: dict[int, Walk] = {}  # by graph task
        self._members: dict[int, int] = {}  # what counts, by number, and for how many bytes; oldest first
        self._used_up: dict[int, int] = {}  # those of them that backward has had as often as it saved
        self._out: dict[int, int] = {}  # those of them that were on their way out when they were brought
        self._arriving: deque[weakref.ref[Record]] = deque()  # reads for a device, whose second leg is still to start
        self._most_bytes: int | None = None  # to have in memory for the rest of a step that had none for more

    @property
    def nbytes(self) -> int:
        """Bytes that count for the budget now."""
        return self._ledger.read_back_bytes

    def meet(self) -> None:
        """Note that another backward asks from now on."""
        self._next_at_bytes = _NOTHING_LACKS

    def may_go_on(self) -> bool:
        """Whether enough memory is free by now to read on, or something has come for a device."""
        return self._ledger.in_memory_bytes <= self._next_at_bytes or bool(self._arriving)

    def ask(self, record: Record, task: int) -> bool:
        """Note that backward (graph task `task`) asks for a record; False if it has asked before."""
        walk = self._walks.get(task)
        if walk is None:
            if len(self._walks) >= _MAX_WALKS:
                self._orders.learn(self._walks.pop(next(iter(self._walks))))
            walk = self._walks[task] = self._orders.begin(record.number, (record.label, record.nbytes))
        return walk.ask(record.number)

    def bring(self, record: Record, task: int) -> bool:
        """Bring a record that backward asks for into memory, or on its way there; True if it is there.

        Others are evicted first; it is brought even where that frees too little. If it is on its way now, what is
        expected next follows it. Raises ClosedError, TransferError.
        """
        if record.state is PENDING:
            self._pending.wanted(record)
        if not self._is_here(record):
            self._make_room(record, record, self._ledger.read_bytes, evict_unused=True)
            self._bring(record, asked=True)
        if record.state is READING:
            self.advance(task, record)
            return False
        return True

    def advance(self, task: int, current: Record | None) -> None:
        """Start reading what is expected after `current`, as far as the budget reaches."""
        if self._arriving:
            self._start_second_legs()
        walk = self._walks.get(task)
        if walk is not None and self.records and self._most_bytes != 0:
            lacks_bytes = self._read(walk, current)
            self._next_at_bytes = self._ledger.in_memory_bytes - lacks_bytes

    def _read(self, walk: Walk, current: Record | None) -> int:
        """Read on along a walk; returns the bytes that lack for the next read, or at least one."""
        budget_bytes = self._ledger.read_bytes
        if self._most_bytes is not None:
            budget_bytes = min(budget_bytes, self._most_bytes)
        lacks_bytes = 0
        if self._members:
            lacks_bytes = self._ledger.read_back_bytes + read_burst_bytes(budget_bytes) - budget_bytes
        # Nobody else could make room.
        if lacks_bytes > 0 and len(self._used_up) == (current is not None and current.number in self._used_up):
            return lacks_bytes
        lowest = next(iter(self.records))
        while (number := walk.peek(lowest)) is not None:
            record = self._record(number)
            if record is None or record.state in (POISONED, DERIVED) or self._is_here(record):
                walk.take()
                continue
            if not self._make_room(record, current, budget_bytes, evict_unused=False):
                return max(1, self._ledger.read_back_bytes + record.nbytes - budget_bytes)
            walk.take()
            tracer = interrupts.tracer()
            try:
                self._bring(record, asked=False)
            except RuntimeError as error:  # OffloadError, or no memory: the unpack that asks for it will say so
                interrupts.pass_on(error, tracer)
                self._met(error)
                return 1
        return _NOTHING_LACKS  # until something else is asked for

    def go_on(self, task: int, step_number: int) -> None:
        """Go on reading, as backward (graph task `task`) asks for something that has no record.

        `step_number`: of the step's first record.
        """
        if task not in self._walks and self.records:
            number, reference = next(reversed(self.records.items()))
            record = reference()
            # Of several graphs that live, nothing tells yet which one backward goes through.
            if record is None or self._walks or next(iter(self.records)) < step_number:
                return
            self._walks[task] = self._orders.begin(number, (record.label, record.nbytes))
        self.advance(task, None)

    def answered(self, record: Record) -> None:
        """Note that backward got a record, for the last time perhaps (`Record.answer`)."""
        number = record.number
        if record.asks >= record.saves and number in self._members:
            self._used_up[number] = self._members[number]
        if not self._write_behind.progress.over:
            self._write_behind.progress.look()

    def let_go(self, current: Record) -> None:
        """Let go of all memory that can be had again, as there is too little; `current` is being asked for."""
        self._most_bytes = self._arrived_bytes() // 2
        for reference in list(self.records.values()):
            record = reference()
            if record is None or record is current:
                continue
            record.keep_decoded(None)
            if record.number in self._members and not record.lent and (record.state is RESTORED or record.write):
                self._evict(record, waits=False)
        self._mover.memory.give_back()

    def hand_over(self, record: Record) -> None:
        """Let go of a record's memory, which now belongs to the program that asked for it."""
        record.drop()
        self._leave(record.number)

    def settle(self) -> None:
        """Give back what dead records left, and check whether written ones were edited before the copy was finished."""
        mover = self._mover
        if mover.ended or mover.copies.count or mover.timed:
            mover.land()
        while self.remains:
            remains = self.remains.popleft()
            self._bury(remains)
            if self._execution is not None:
                self._execution.freed(remains.number)
            if remains.write is not None:
                mover.discard(remains.write)
        if mover.landing.unconfirmed:
            mover.landing.confirm()

    def _bury(self, remains: Remains) -> None:
        """Forget a record that has died."""
        number = remains.number
        self.records.pop(number, None)
        if number in self._write_behind.members:
            self._write_behind.bury(number)
        self._ledger.bury(remains.nbytes, self._forget(number) if number in self._members else 0)
        if self._mover.recorder.trace is not None:
            now_s = time.perf_counter()
            self._mover.recorder.note("freed", now_s, now_s, 0, f"#{number}")
            self._ledger.note()

    def end_walks(self) -> None:
        """Learn from the walks of a step that has ended, and make way for the next. None of this waits."""
        for walk in self._walks.values():
            self._orders.learn(walk)
        self._walks.clear()
        self._most_bytes = None
        self.make_way()

    def make_way(self) -> None:
        """Under a set budget, let go of what was read back, so that forward gets the room. None of this waits.

        It was read for graphs that live on, or to compare what a recipe gives with what it is to replace.
        """
        if self._ledger.limited and self._members:
            for number in list(self._members):
                if (record := self._record(number)) is not None:
                    self._evict(record, waits=False)

    def _record(self, number: int) -> Record | None:
        """Find a record that lives."""
        reference = self.records.get(number)
        return reference() if reference is not None else None

    def _bring(self, record: Record, *, asked: bool) -> None:
        if self._is_here(record):
            return  # another thread has brought it, while this one waited for room
        if record.state is RESIDENT and record.write is None:
            record.want()  # the write that it was chosen for waits for room, or has failed
        elif record.state is STORED:
            self._mover.fetch(record, asked=asked)
            if record.stream is not None and record.read is not None:
                self._arriving.append(record.ref)
        elif record.state is WRITING:
            if not self._mover.take_back(record):
                self._out[record.number] = record.nbytes
        elif record.state is PENDING:
            self._pending.wanted(record)
        self._members[record.number] = record.nbytes
        self._ledger.count_read_back(record.nbytes)
        if self._ledger.may_peak():
            self._ledger.note(self._still_out_bytes())

    def _still_out_bytes(self) -> int:
        """Bytes of what counts here and is still on its way out, where it counts too."""
        for number in list(self._out):
            record = self._record(number)
            if record is None or record.state is not WRITING:
                del self._out[number]
        return sum(self._out.values())

    def _is_here(self, record: Record) -> bool:
        """Whether the record counts already, for this budget or for write-behind's, or never moves."""
        return record.stays or record.number in self._members or record.number in self._write_behind.members

    def _make_room(self, wanted: Record, current: Record | None, budget_bytes: int, *, evict_unused: bool) -> bool:
        need = self._ledger.read_back_bytes + wanted.nbytes - budget_bytes
        if need <= 0:
            return True
        alone = not self._ledger.limited  # then what is larger than the budget may be read ahead on its own
        for members in (self._used_up, self._members) if evict_unused else (self._used_up,):
            for number in list(members):
                record = self._record(number)
                if record is None or record is current:
                    continue
                need -= self._evict(record)
                if need <= 0:
                    return True
        return alone and not self._ledger.read_back_bytes

    def _evict(self, record: Record, *, waits: bool = True) -> int:
        """Evict a record; returns the bytes this frees (soon, where they are still to be written).

        What the store does not have is sent, which may wait for room; unless it `waits`, it is held again instead.
        """
        nbytes = self._members.get(record.number, 0)
        if record.state is READING:
            return 0  # its memory cannot be taken from under the transfer
        if record.state is WRITING:
            record.want(False)
        elif record.state in IN_MEMORY and record.write is None:
            self._leave(record.number)  # before the write: it counts as in flight then
            record.want(False)
            if not waits:
                self._write_behind.hold_again(record)
                return 0
            return nbytes if self._write_behind.send(record) is None else 0
        else:
            record.drop()
        self._leave(record.number)
        return nbytes

    def _leave(self, number: int) -> None:
        """Count a record no longer, if it counts here; it lives on."""
        if number in self._members:
            self._ledger.count_read_back(-self._forget(number))

    def _forget(self, number: int) -> int:
        """Forget a record that counts here; returns the bytes that it counted for."""
        self._used_up.pop(number, None)
        self._out.pop(number, None)
        return self._members.pop(number)

    def _arrived_bytes(self) -> int:
        """Bytes of what counts here, less what a device has still to get."""
        arriving = [record for reference in self._arriving if (record := reference()) is not None]
        to_come = sum(self._members.get(record.number, 0) for record in arriving if record.read is not None)
        return self._ledger.read_back_bytes - to_come

    def _met(self, error: BaseException) -> None:
        """Meet an error of a read ahead of its time: where memory is lacking, no more of it is taken in this step.

        An allocator that finds no memory waits for the device and gives back all that it keeps: not at every tensor.
        """
        if shortage.lacks_memory(error):
            self._most_bytes = self._arrived_bytes()

    def _start_second_legs(self) -> None:
        while self._arriving:
            record = self._arriving[0]()
            if record is not None and record.read is not None:
                if not record.read.done():
                    return
                if self._most_bytes is not None and self._arrived_bytes() + record.nbytes > self._most_bytes:
                    return
                if record.read.error is None:  # an error is raised by the unpack that asks for this tensor
                    tracer = interrupts.tracer()
                    try:
                        self._mover.arrive(record)
                    except shortage.ENDS as error:  # no memory on the device now: that unpack reads it again
                        interrupts.pass_on(error, tracer)
                        self.hand_over(record)
                        self._met(error)
            self._arriving.popleft()
