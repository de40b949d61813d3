"""Light hooks: tensors that stay in memory for sure are let pass without a record.

A record costs a step many times what a look at where a tensor's memory is costs. There are two kinds of steps in which
it is known beforehand what stays:

- Under a budget that a step has fitted, nothing is to move in those that are called alike (`Rest`). They are counted:
  memory by its address, which an operator's views share. That counts overlapping slices more than once, and so is never
  less than what stays; a step goes on to be counted while it is at most what a step that fitted was, and within the
  budget.
- Where a plan stands for a budget that was set, each step does what the one before did (`Course`).

Guarantees:

1. A step that saves more than the one that fitted, or other than the one that was planned, is found in its middle, at
   the first tensor that tells. From there on the full hooks take over, with so much less room as has been let pass:
   the budget holds.
2. What is let pass is the tensor that autograd saves, or an alias that shares its version counter: an edit in place is
   found as it always is.

Wants the engine's lock held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._record.sighting import Sizes
from .course import SMALL, Course, Entry, Notes, UnknownMemoryError, memory_of


class Light:
    """Decision, for each tensor of a step, whether it may pass.

    Args:
        counts: whether there may be steps that only count, so that full ones are counted as well.
        sizes: the bytes of the smallest slice that may have a record, and of the smallest storage.
        turned: called when the full hooks take over from a course; gets whether the step has departed from its plan.

    Attributes:
        on: tensors of the step under way may pass.
        turned: the full hooks have taken over for the rest of this step.
        course: what the step under way follows; None where it only counts.
        passed_bytes: let pass in this step.
        fitted_bytes: counted in the largest step that has fitted.
    """

    def __init__(self, counts: bool, sizes: Sizes, turned: Callable[[bool], object]) -> None:
        self.on = False
        self.turned = False
        self.course: Course | None = None
        self.passed_bytes = 0
        self.fitted_bytes = 0
        self._counts = counts
        self._sizes = sizes
        self._tell_turned = turned
        self._by_address: dict[int, int] = {}
        self._counted_bytes = 0
        self._notes: Notes | None = None
        self._kind: object = None  # of step, that is followed or written down

    def begin_counting(self) -> None:
        """Only count from here on."""
        if self.course is not None:
            self.turn()
        self.on = self._counts and not self.turned

    def follow(self, kind: object, entries: list[Entry] | None) -> None:
        """Follow a step of this kind that was written down, from here on; if there is none, write this one down.

        A further forward of the step under way goes on with what the first has begun, if that is of its kind.
        """
        if self._kind is not None or self.on or self.turned:
            if self._kind is not kind:
                self.turn()
            return
        self._kind = kind
        if entries is None:
            self._notes = Notes(self._sizes)
        else:
            self.course, self.on = Course(entries, self._sizes.storage_bytes), True

    def turn(self, *, departs: bool = True) -> None:
        """Have the full hooks take over, for the rest of the step. What was begun to be written down is given up.

        `departs`: it is another step than the one that was planned.
        """
        self._notes = None
        if self.on:
            self.on, self.turned = False, True
            if self.course is not None:
                self._tell_turned(departs)

    def passes(self, tensor: Tensor) -> Entry | None:
        """Find what becomes of a tensor that is saved: how many of its bytes are let pass, or that its record moves.

        None if the full hooks have taken over.
        """
        try:
            found = memory_of(tensor, self._sizes)
        except UnknownMemoryError:
            self._counts = False
            self.turn()
            return None
        if found is None:
            return SMALL
        entry = self.course.next(*found) if self.course is not None else self._counted(*found)
        if entry is None:
            self.turn()
        else:
            self.passed_bytes += entry.kept_bytes
        return entry

    @property
    def watches(self) -> bool:
        """Whether it matters what the full hooks make of a tensor: a later step may need no more of them."""
        return self._notes is not None or self._counts_now

    def packed(self, tensor: Tensor, packed: Any) -> None:
        """Note what the full hooks have made of a tensor. Call it while `watches`."""
        try:
            found = memory_of(tensor, self._sizes)
        except UnknownMemoryError:
            self._counts = False
            if self._notes is not None:
                self._notes.entries = None
            return
        if self._notes is not None:
            self._notes.note(found, packed[0])
        if self._counts_now and found is not None:
            self._count(*found)

    def forget(self) -> None:
        """Begin the step under way anew: nothing is left of what it has saved."""
        self.on = self.turned = False
        self.course = self._notes = self._kind = None
        self._counted_bytes = 0
        self._by_address.clear()

    def end_step(self, room_bytes: int | None) -> None:
        """End a step. `room_bytes`: what there is room for, if it is one of those that fit."""
        if room_bytes is None:
            self.fitted_bytes = 0
        elif self._counted_bytes <= room_bytes:
            self.fitted_bytes = max(self.fitted_bytes, self._counted_bytes)
        self.forget()
        self.passed_bytes = 0

    @property
    def written_down(self) -> list[Entry] | None:
        """What the step under way was, if that has been written down to its end."""
        return self._notes.entries if self._notes is not None else None

    @property
    def _counts_now(self) -> bool:
        return self._counts and self.course is None and not self.turned

    def _counted(self, nbytes: int, address: int) -> Entry | None:
        more_bytes = self._count(nbytes, address)
        return Entry(nbytes, False, more_bytes, 0, 0) if self._counted_bytes <= self.fitted_bytes else None

    def _count(self, nbytes: int, address: int) -> int:
        """Count memory; returns by how much there is more of it now."""
        more_bytes = max(0, nbytes - self._by_address.get(address, 0))
        if more_bytes:
            self._by_address[address] = nbytes
            self._counted_bytes += more_bytes
        return more_bytes
