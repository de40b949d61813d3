"""Unpacking: how a record that backward asks for becomes the tensor that was saved.

Guarantees:

1. A record in memory is answered from there; any other is read, by its own read or one that read-ahead has begun.
2. Waiting for a read lets go of the engine's lock: workers take that to land, and other threads go on. (A comparison in
   pack keeps it, and so workers do not insist on having it.) Waiting for room lets go of it too, so that comes last
   of what is done with it (`ReadAhead.advance`).
3. Where memory is lacking, what was read ahead is let go of, what is on its way out is waited for, PyTorch's allocator
   gives back what it keeps, and the record is asked for once more. Then PyTorch's own error is raised, as programs know
   it; the record is where it was.
4. What had ended while the lock was held is landed as soon as it is let go of (`Mover.catch_up`).

While the lock is away another thread may evict the record, or end its graph's step. So after each wait the question is
asked anew, of the state that is found then.

Takes the engine's lock, which is reentrant.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import Tensor

from .._auto.execution import Execution
from .._derive.derivations import again
from .._device import memory as device_memory
from .._memory import shortage
from .._record.record import DERIVED, IN_MEMORY, READING, Record
from .._record.restore import restore
from .._record.user_code import look_for_code
from .._record.view import View, is_edited
from .._transfer.mover import Mover
from . import backward
from .packing import Packing
from .pending import Pending
from .read_ahead import ReadAhead
from .readings import Readings
from .step import Step
from .steps import Steps
from .write_behind import WriteBehind

T = TypeVar("T")


class Unpacking:
    """Answers backward from memory or from the store, and has what is expected next read ahead."""

    def __init__(
        self,
        *,
        mover: Mover,
        write_behind: WriteBehind,
        pending: Pending,
        read_ahead: ReadAhead,
        steps: Steps,
        readings: Readings,
        execution: Execution | None,
        packing: Packing,
    ) -> None:
        self._lock = mover.lock
        self._mover = mover
        self._landing = mover.landing
        self._write_behind = write_behind
        self._pending = pending
        self._compressor = pending.compressor
        self._derivations = pending.derivations
        self._read_ahead = read_ahead
        self._steps = steps
        self._readings = readings
        self._execution = execution
        self._packing = packing
        self._times = execution is not None and self._compressor is None  # as packing does

    def tensor(self, record: Record, view: View, task: int, to_code: bool) -> Tensor:
        """Do as `_answer` says, and count the work if plans are made from it."""
        if not self._times or record.stream is not None or record.state is DERIVED:
            return self._answer(record, view, task, to_code)
        begun = self._mover.cost.begin_work()
        tensor = self._answer(record, view, task, to_code)
        with self._lock:
            self._mover.cost.work(begun, 0)
        return tensor

    def _answer(self, record: Record, view: View, task: int, to_code: bool) -> Tensor:
        """Give the tensor that was saved as `view` of a record, to graph task `task` (-1: no backward asks).

        Args:
            to_code: whether a program's own code asks, which gets memory of its own.

        Raises:
            RuntimeError: PyTorch's own, for a tensor that was edited in place.
            RuntimeError, OutOfMemoryError: PyTorch's own, where there is no memory for it.
            TransferError, ClosedError: its bytes could not be brought back.
        """
        with self._lock:
            if self._derivations is not None and (peeked := self._derivations.peek(record, view)) is not None:
                return peeked
            self._meet(task)
            if self._pending.waits:
                self._pending.settle(wait=self._compressor is not None and self._compressor.lossy)
            if not record.asks:
                self._mover.pressure.moved(record.nbytes)
            if self._execution is not None and task != -1:
                self._execution.asked(record)
            if record.restored is not None and is_edited(record.restored):
                self._read_ahead.hand_over(record)  # a hook of its node did, or a recomputation: it is read again
            derived = record.state is DERIVED
            again_asked = not derived and task != -1 and not self._read_ahead.ask(record, task)
            if again_asked and not to_code and record.shows():
                record.answer()
                self._read_ahead.answered(record)
                return restore(record, view)
            give = partial(self._give, record, view, task, to_code)
            tensor, spared = (None, False) if derived else self._sparing(record, partial(give, record.asks))
        if derived:
            return self._sparing(record, partial(again, record, view, alone=to_code))[0]
        while tensor is None:
            self._mover.await_read(record)
            with self._lock:
                tensor, spared = self._sparing(record, partial(give, record.asks), spared=spared)
        return tensor

    def passed(self, task: int) -> None:
        """Note that graph task `task` asks for what stayed without a record, and read on."""
        mover = self._mover
        with self._lock:
            step = self._meet(task)
            if mover.recorder.trace is not None:
                self._write_behind.ledger.note()
            if step.course is not None and not mover.closed:
                self._read_on(step, task)
        if mover.ended:
            mover.catch_up()

    def _read_on(self, step: Step, task: int) -> None:
        """Read on in a step of which some stays without a record, where that has made room."""
        if step.due:
            self._packing.pass_on(step, None)
        if self._execution is not None:
            self._execution.asked(None)
        if self._read_ahead.may_go_on():
            self._read_ahead.go_on(task, step.first_number)

    def _meet(self, task: int) -> Step:
        """Note that graph task `task` asks (-1: no backward does), and settle. Returns the step under way."""
        step, mover = self._steps.current, self._mover
        if task not in (-1, step.task):
            step.ask(task)
            self._read_ahead.meet()
            backward.begins()
            self._readings.look_at_caches()
        if self._read_ahead.remains or self._landing.unconfirmed or mover.ended or mover.copies.count:
            self._read_ahead.settle()
        return step

    def _sparing(self, record: Record, make: Callable[[], T], *, spared: bool = False) -> tuple[T, bool]:
        """Make a tensor, and once more where memory was lacking, if not `spared` before; returned too."""
        while True:
            try:
                return make(), spared
            except shortage.ENDS as error:
                if not shortage.lacks_memory(error):
                    raise
                failure = _lack(record, error)
            try:  # not within the other, whose error would hold this one, and this one what it holds
                if spared:
                    raise failure
            finally:
                del failure
            with self._lock:
                self._read_ahead.let_go(record)
                if self._derivations is None or not self._derivations.compares_here:  # that keeps the lock
                    self._mover.wait_for_room(0, 0)  # for what is on its way out
            device_memory.give_back(record.device)
            spared = True

    def _give(self, record: Record, view: View, task: int, to_code: bool, asks: int) -> Tensor | None:
        """Return the tensor if the record is in memory; else its read is under way, and None is returned.

        `asks`: how often it had been asked for; where it is more now, a first try has counted this one.
        """
        read_ahead = self._read_ahead
        if not self._bring(record, task):
            return None
        if record.asks == asks:
            record.answer()  # first: what follows depends on whether it is asked for again
        if to_code:
            tensor, gone = look_for_code(record, view, task)
            if gone:
                read_ahead.hand_over(record)
        else:
            tensor = restore(record, view)
        read_ahead.answered(record)
        read_ahead.advance(task, record)  # last: waiting for room in it lets go of the lock
        return tensor

    def _bring(self, record: Record, task: int) -> bool:
        """Bring a record into memory; False if it is on its way."""
        if record.state is not READING:
            record.check()
            if record.offloaded and not record.asks and record.state in IN_MEMORY:
                self._mover.forward(record)
            return self._read_ahead.bring(record, task)
        try:
            arrived = self._mover.arrive(record)
        except shortage.ENDS:  # TransferError, or no memory on the device
            self._read_ahead.hand_over(record)
            raise
        if not arrived:
            self._read_ahead.advance(task, record)
        return arrived


def _lack(record: Record, error: BaseException) -> RuntimeError:
    about = (
        f"tba: {record.name()} was to be brought back for backward; what had been read ahead or was on its way out was "
        "let go of first"
    )
    return shortage.in_torchs_words(error, record.plain_bytes, about)
