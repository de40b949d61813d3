"""Pending: what operators saved, from pack until the operator has finished and the tensor may be touched.

Guarantees:

1. A tensor is read, by a codec or for writing, only after its operator's kernel has returned: pack runs before the
   kernel, which may still fill what was saved. The sequence number of autograd's nodes, per thread, tells.
2. Then it is let go if others give it again (`derivations`), or goes through its codec, if it has one, and only then
   to `WriteBehind` or, compressed in place, nowhere.
3. What backward wants before that goes through its codec as well: what a lossy codec makes does not depend on timing.
   Under an exact preset a device's tensor stays as it is then, and backward waits for no device.

Wants the engine's lock held.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

from .._auto.execution import Execution
from .._compress.compressor import Compressor
from .._derive.derivations import Derivations
from .._derive.worth import Worth
from .._plan.policy import DERIVED
from .._record.record import PENDING, Record
from .._stats import Counters
from .._transfer.cost import Cost
from .write_behind import WriteBehind


class _Local(threading.local):
    """Per thread, the records whose operators may still be running, with the sequence number at pack."""

    def __init__(self) -> None:
        self.queue: deque[tuple[int, weakref.ref[Record]]] = deque()


class Pending:
    """Saved tensors whose operators may still be running."""

    def __init__(
        self,
        write_behind: WriteBehind,
        counters: Counters,
        compressor: Compressor | None,
        derivations: Derivations | None,
        execution: Execution | None,
        cost: Cost,
    ) -> None:
        self._cost = cost
        self._write_behind = write_behind
        self._counters = counters
        self.derivations = derivations
        self.compressor = compressor
        self._late: deque[weakref.ref[Record]] = deque()  # finished, but a source is not settled yet (`awaits`)
        self._execution = execution  # hears of each record once it is known what a codec leaves of it
        self.local = _Local()

    def add(self, sequence_nr: int, record: Record) -> None:
        """Queue a record that an operator of this thread saves, at this sequence number, behind those that finished."""
        queue = self.local.queue
        queue.append((sequence_nr, record.ref))
        if queue[0][0] < sequence_nr:
            self.pass_on(sequence_nr)

    def pass_on(self, sequence_nr: int | None) -> None:
        """Pass on what this thread's finished operators saved (None: no operator of this thread runs)."""
        pending = self.local.queue
        while pending and (sequence_nr is None or pending[0][0] < sequence_nr):
            record = pending.popleft()[1]()
            if record is None or record.state is not PENDING:
                continue
            if self.derivations is None or record.recipe is None:
                self._compared(record, replaced=False)
            elif self.derivations.awaits(record):
                record.examine(True)
                self._late.append(record.ref)
            else:
                self._compare(record, self.derivations)

    def wanted(self, record: Record) -> None:
        """Keep a pending record in memory that backward asks for; its operator has finished, then."""
        compressor = self.compressor
        if compressor is not None and (compressor.lossy or record.stream is None) and not compressor.encode(record):
            self.settle(wait=True, but=record)
        if self._execution is not None:
            self._execution.packed(record)
        record.examine(False)
        record.hold()

    @property
    def waits(self) -> bool:
        """Whether values that decide are still on their way from a device, so that `settle` is to be called."""
        if self.derivations is not None and self.derivations.waiting:
            return True
        return self.compressor is not None and bool(self.compressor.waiting or self._late)

    def settle(self, *, wait: bool, but: Record | None = None) -> None:
        """Pass on records whose values have come from the device, all of them if `wait`; `but` is not passed on."""
        while True:
            if self.derivations is not None:
                for record, replaced in self.derivations.settle(wait=wait):
                    # What came before it may have waited for room, without the lock: another thread has had it since.
                    if replaced or (record.state is PENDING and record is not but):
                        self._compared(record, replaced=replaced)
            for record in () if self.compressor is None else self.compressor.settle(wait=wait):
                if record.state is PENDING and record is not but:
                    self._go(record)
            if not self._compare_late(but) or not wait:
                return

    def _compare_late(self, but: Record | None) -> bool:
        """Compare what waits for its sources, as far as they are settled by now, but `but`; whether anything was."""
        compared, derivations = False, self.derivations
        # A comparison asks for its sources, which may come here once more: one goes after the other.
        while self._late and derivations is not None and not derivations.compares_here:
            record = self._late[0]()
            if record is not None and record.state is PENDING and derivations.awaits(record):
                break
            self._late.popleft()  # first: waiting for room in what follows lets go of the lock
            if record is not None:
                record.examine(False)
            if record is not None and record is not but and record.state is PENDING:
                self._compare(record, derivations)
                compared = True
        return compared

    def _compare(self, record: Record, derivations: Derivations) -> None:
        self._find_cost(record, derivations)
        begun = self._cost.begin_work()
        replaced = derivations.replaces(record)
        self._cost.leave_out(self._cost.begin_work() - begun)
        if replaced is not None:
            self._compared(record, replaced=replaced)

    def _find_cost(self, record: Record, derivations: Derivations) -> None:
        """Find out what making a record again takes, if a plan is to be made next."""
        if (execution := self._execution) is not None and execution.tries(record):
            with execution.apart():
                found = derivations.cost(record)
            if found is not None:
                execution.derivable(record, *found)

    def end_step(self, worth: Worth, numbers: int) -> None:
        """End a step; so many records have been made since the start."""
        cost = self._cost
        worth.end_step(cost.per_byte_s)
        if self.compressor is not None:
            further_byte_s = cost.per_further_byte_s if worth.settled else 0.0
            self.compressor.end_step(further_byte_s, worth.derive_s, worth.derived_bytes)
        if self.derivations is not None:
            self.derivations.end_step(numbers)

    def _compared(self, record: Record, *, replaced: bool) -> None:
        if replaced:
            self._let_go(record)
        elif self.compressor is None or self.compressor.encode(record):
            self._go(record)

    def _let_go(self, record: Record) -> None:
        if self._execution is not None:
            self._execution.packed(record)
        self._counters.derived_bytes += record.nbytes
        self._counters.kept_to_offloaded(record.set_offloaded(False), DERIVED)

    def _go(self, record: Record) -> None:
        if self._execution is not None:
            self._execution.packed(record)
        if record.stays:
            record.hold()
        else:
            self._write_behind.add(record)
