"""Step: one micro-batch, from its first tensor to its end: what the hooks do in it, and what it has shown so far.

A record costs a step many times what a look at where a tensor's memory is costs. In two kinds of steps it is known
beforehand what stays, and only the rest needs records:

- Under a budget that a step has fitted, nothing is to move in those that are called alike (`Rest`). They are counted:
  memory by its address, which an operator's views share. That counts overlapping slices more than once, and so is never
  less than what stays; a step goes on to be counted while it is at most what a step that fitted was, and within the
  budget.
- Where a plan stands for a budget that was set, each step does what the one before did (`Course`).

Guarantees:

1. A step that saves more than the one that fitted, or other than the one that was planned, is found in its middle, at
   the first tensor that tells. From there on the full hooks take over, with less room by what stays without a record:
   the budget holds.
2. A step is replaced at its end, so nothing of one is left in the next.

Wants the engine's lock held.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from itertools import count, cycle
from typing import Any

from torch import Tensor

from io_backends import interrupts

from .._auto.course import Course, Entry, Notes
from .._record.sighting import ODD, Sighting, Sizes, Stays


class StepMode(enum.Enum):
    """What the hooks do with the tensors that a forward saves."""

    FULL = enum.auto()  # recognise each, and make a record of what is worth moving
    OFF = enum.auto()  # nothing, they are off: a forward that was called alike has fitted with room to spare
    COUNTING = enum.auto()  # let each stay, and count its bytes
    RECORDING = enum.auto()  # as FULL, and write down what becomes of each, for the next step by this plan
    FOLLOWING = enum.auto()  # do what the step did that was written down: only what moves has a record
    TURNED = enum.auto()  # as FULL, to the end of the step, which is none to be counted or followed after all


# By names of their own, as the states of a record.
FULL, OFF, COUNTING, RECORDING, FOLLOWING, TURNED = StepMode
LIGHT = (COUNTING, FOLLOWING)
_NEXT = {
    FULL: (OFF, COUNTING, RECORDING, FOLLOWING),
    OFF: (FULL,),
    COUNTING: (TURNED,),
    RECORDING: (FULL, COUNTING),
    FOLLOWING: (TURNED,),
    TURNED: (),
}

MOVES, FOLLOWS, DEPARTS = -1, -2, -3  # in the place of the bytes that stay with a tensor
_UNKNOWN = (-1, 0)
_LOOKS = 32  # of a step; each takes some 25 microseconds, and the last tells when the step has ended


class Step:
    """One micro-batch. Only methods of this class change its mode, and each change asserts that it may come:

        FULL       rest -> OFF, count -> COUNTING, follow -> FOLLOWING, or RECORDING where nothing is written down yet
        OFF        wake -> FULL
        COUNTING   turn -> TURNED
        RECORDING  turn -> FULL, count -> COUNTING
        FOLLOWING  turn -> TURNED

    Args:
        first_number: of its first record.
        before_bytes: saved before it that were worth moving.
        sizes: of what may have a record.
        fitted_bytes: counted in the largest step that has fitted; None where steps are not counted.

    Attributes:
        begun_s: when its first tensor was saved, by the host's clock; None before.
        task: the backward (graph task) that asked last; -1 before any has.
        kind: of step, that is followed or written down.
        course: what the step follows, or has followed until it turned.
        due: tensors that stay whose operators may still be running: autograd's sequence number, what was packed, bytes.
        saved: next(saved) counts a tensor that is saved in a step that follows another.
        looks: next(looks) tells, of a tensor that backward asks for and that has no record, whether it is one of the
            few at which the engine looks around. There are as many of them whatever the number of tensors.
        counted_bytes: of all memory that was saved while it was looked at.
        passed_bytes: let stay without a record.
        countable: where steps are counted, whether each tensor has told where its memory is.
        over: another has taken its place.
    """

    def __init__(self, first_number: int, before_bytes: int, sizes: Sizes, fitted_bytes: int | None) -> None:
        self.mode = FULL
        self.over = False
        self.begun_s: float | None = None
        self.task = -1
        self.first_number = first_number
        self.before_bytes = before_bytes
        self.kind: object = None
        self.course: Course | None = None
        self.due: deque[tuple[int, tuple[Any, ...], int]] = deque()
        self.saved = count()
        self.looks = cycle((True,))
        self.counted_bytes = self.passed_bytes = 0
        self.countable = fitted_bytes is not None
        self._fitted_bytes = fitted_bytes or 0
        self._sizes = sizes
        self._by_address: dict[int, int] = {}
        self._notes: Notes | None = None

    def anew(self) -> Step:
        """Begin it anew: nothing is left of what it has saved, as nobody wanted that forward's gradients."""
        fitted_bytes = self._fitted_bytes if self.countable else None
        step = Step(self.first_number, self.before_bytes, self._sizes, fitted_bytes)
        step.begun_s, step.passed_bytes = self.begun_s, self.passed_bytes
        return step

    # -- transitions -----------------------------------------------------------------------------------------------

    def _become(self, mode: StepMode) -> None:
        assert mode in _NEXT[self.mode], (self.mode, mode)
        self.mode = mode

    def begin(self) -> None:
        """Begin: its first tensor is saved."""
        self.begun_s = time.perf_counter()

    def end(self) -> None:
        """End: another takes its place."""
        self.over = True

    def ask(self, task: int) -> None:
        """Note that a backward, graph task `task`, asks; -1: none is under way that asks for anything of this step."""
        if self.task == -1 and self.course is not None:
            self.looks = cycle((True, *[False] * (next(self.saved) // _LOOKS - 1)))
        self.task = task

    def rest(self) -> None:
        """Have the hooks off in the forward that begins."""
        self._become(OFF)

    def wake(self) -> None:
        """Have the hooks on in the forward that begins."""
        if self.mode is OFF:
            self._become(FULL)

    def count(self) -> None:
        """Only count from here on, where memory can be counted."""
        if self.countable and self.mode in (FULL, RECORDING):
            self._notes = None
            self._become(COUNTING)

    def follow(self, kind: object, entries: list[Entry] | None) -> None:
        """Follow a step of this kind that was written down, from here on; if there is none, write this one down."""
        self._become(RECORDING if entries is None else FOLLOWING)
        self.kind = kind
        if entries is None:
            self._notes = Notes(self._sizes)
        else:
            self.course = Course(entries, self._sizes.storage_bytes)

    def turn(self) -> None:
        """Have the full hooks take over, for the rest of the step. What was begun to be written down is given up."""
        self._notes = None
        if self.mode is RECORDING:
            self._become(FULL)
        elif self.mode in LIGHT:
            self._become(TURNED)

    # -- what it saves ---------------------------------------------------------------------------------------------

    def kept_bytes(self, tensor: Tensor, seen: Stays | Sighting) -> int:
        """Return the bytes that stay with a tensor without a record.

        MOVES or FOLLOWS where it has one, and moves or is given again by others; DEPARTS where it tells that the step
        is another one than was counted on, or followed.
        """
        found = self._memory(tensor, seen)
        if found is None:
            return 0
        if found is _UNKNOWN:
            return DEPARTS
        if self.course is None:
            nbytes = self._count(*found)
            if self.counted_bytes > self._fitted_bytes:
                return DEPARTS
        else:
            entry = self.course.next(*found)
            if entry is None:
                return DEPARTS
            if entry.moves or entry.follows:
                return FOLLOWS if entry.follows else MOVES
            nbytes = entry.kept_bytes
        self.passed_bytes += nbytes
        return nbytes

    def note(self, tensor: Tensor, seen: Stays | Sighting, first: Any) -> None:
        """Note what the full hooks have made of a tensor; `first` of what they packed."""
        found = self._memory(tensor, seen)
        if found is _UNKNOWN:
            self.turn()
            return
        if self._notes is not None:
            self._notes.note(found, first)
        if self.countable and found is not None:
            self._count(*found)

    @property
    def is_whole(self) -> bool:
        """Whether all of it was seen."""
        return self.mode is not COUNTING and (self.course is not None or self.mode is not TURNED)

    @property
    def written_down(self) -> list[Entry] | None:
        """What the step was, if that has been written down to its end."""
        return self._notes.entries if self._notes is not None else None

    def _memory(self, tensor: Tensor, seen: Stays | Sighting) -> tuple[int, int] | None:
        """Return a tensor's bytes and their address; None for a weight and what is small, _UNKNOWN where none tells."""
        if type(seen) is Sighting:
            if seen.nbytes < self._sizes.slice_bytes:
                return None
            try:
                return min(seen.nbytes, seen.storage_bytes), tensor.data_ptr()
            except RuntimeError as error:
                interrupts.pass_on_from_call(error)
        elif seen is not ODD:
            return None
        self.countable = False
        return _UNKNOWN

    def _count(self, nbytes: int, address: int) -> int:
        """Count memory; returns by how much there is more of it now."""
        more_bytes = nbytes - self._by_address.get(address, 0)
        if more_bytes <= 0:
            return 0
        self._by_address[address] = nbytes
        self.counted_bytes += more_bytes
        return more_bytes
