"""Passing: packs what needs no record, and goes on with what moves meanwhile.

Wants the engine's lock held.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from ..._torch.private import sequence_nr
from ..packing import Packed, as_it_is
from ..pending import Pending
from ..read_ahead import ReadAhead
from ..write_behind import WriteBehind
from .light import Light
from .planner import Planner


class Passing:
    """Packs tensors that stay in memory for sure, and counts those of a step that is planned."""

    def __init__(
        self, light: Light, write_behind: WriteBehind, pending: Pending, read_ahead: ReadAhead, planner: Planner | None
    ) -> None:
        self._light = light
        self._write_behind = write_behind
        self._ledger = write_behind.ledger
        self._pending = pending
        self._read_ahead = read_ahead
        self._planner = planner
        # Passed by operators that may still be running, with autograd's sequence number: counted when they have ended.
        self._due: deque[tuple[int, tuple[Any, ...], int]] = deque()
        self._held_bytes = -1  # when reading went on last: where no memory has been freed since, it cannot again

    def begin(self, planner: Planner, *, follows: bool) -> None:
        """Have the step under way follow a course where it may and can; else write it down for others."""
        light, kind = self._light, planner.kind
        if not (planner.repeats and follows):
            light.turn(departs=False)
        elif light.on or kind.course is None or self._ledger.has_room(sum(e.kept_bytes for e in kind.course)):
            light.follow(kind, kind.course)
            if light.on:
                planner.follow()

    def begin_anew(self) -> None:
        """Forget what the step under way was, if all that it saved has died: nobody wanted that forward's gradients."""
        self.pass_on(None)
        newest = next(reversed(self._read_ahead.records), -1)
        if newest < self._read_ahead.step_number and not self._ledger.graphs_live:
            self._light.forget()
            if self._planner is not None:
                self._planner.forget()

    def tensor(self, tensor: Tensor) -> Packed | None:
        """Pack a tensor that is saved outside of backward; None if the full hooks are to do it."""
        light = self._light
        entry = light.passes(tensor)
        followed = light.course is not None
        number = sequence_nr() if followed else 0
        if self._due:
            self.pass_on(number)
        if entry is None or entry.moves:
            return None
        packed = as_it_is(tensor)
        if not followed:
            if entry.kept_bytes:
                self._write_behind.count(packed, entry.kept_bytes)
            return packed
        if entry.kept_bytes:
            self._due.append((number, packed, entry.kept_bytes))
        if self._pending.local.queue:
            self._pending.pass_on(number)
        return packed

    def pass_on(self, number: int | None) -> None:
        """Count what finished operators have saved (None: none of them runs)."""
        while self._due and (number is None or self._due[0][0] < number):
            _, packed, nbytes = self._due.popleft()
            self._write_behind.let_pass(packed, nbytes)

    def asked(self, task: int) -> None:
        """Note that backward (graph task `task`) has come to something that was let pass, and read on."""
        self.pass_on(None)
        if self._planner is not None:
            self._planner.asked(None)
        held_bytes = self._ledger.passed_bytes + self._ledger.held_bytes
        if held_bytes != self._held_bytes:
            self._held_bytes = held_bytes
            self._read_ahead.go_on(task)
