"""Write-behind: records whose operator has finished and which stay in memory for now, oldest first, within a budget.

What was saved last is wanted first. Tier `nvme` and `cpu` therefore hold back as much as read-ahead may take later
anyway: at the turn from forward to backward it is in memory, and a write of it is never begun. Tier `auto` holds
whatever memory can spare, and looks again at how much that is as it fills. Over budget, the oldest goes first: it is
needed last.

Wants the engine's lock held.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._config import OffloadConfig
from .._device import memory as device_memory
from .._memory import limits as _limits
from .._memory.pressure import LOOK_EVERY_BYTES, look_after_bytes
from .._plan import policy
from .._record.record import Record, Remains
from .._record.user_code import Detached
from .._stats import Counters
from .._transfer.mover import Mover
from .auto.passed import Passed
from .steps import Progress


class WriteBehind:
    """Queue of records on their way out, as slow as memory allows."""

    def __init__(
        self, config: OffloadConfig, mover: Mover, counters: Counters, model: Callable[[], nn.Module | None]
    ) -> None:
        self.nbytes = 0
        self._config = config
        self._mover = mover
        self._counters = counters
        self._progress = Progress(config.tier, counters)
        self._model = model
        # By number, oldest first: bytes of each. In a dict, what has left would be passed on the way to the oldest.
        self.members: OrderedDict[int, tuple[weakref.ref[Record], int]] = OrderedDict()
        self._adapts = config.tier == "auto"
        self.limited = self._adapts and config.memory_budget is not None
        self._devices: set[torch.device] = set()  # of what was held so far: the one with least room left decides
        self._largest_bytes = 0  # of all that was ever held
        self._step_largest_bytes = 0  # of what this step has saved
        self.plan_largest_bytes = 0  # of what a step by plan saves; 0 where none is
        self._room_bytes = 0  # where the budget adapts: what memory had room for when it was looked at
        # Where the budget adapts: saved since memory was looked at, and after how much it is looked at again.
        self._unseen_bytes = self._look_after_bytes = LOOK_EVERY_BYTES
        self.brought_bytes = 0  # of what read-ahead has in memory
        self.told: Callable[[int], None] | None = None  # gets the bytes that saved tensors hold, at each change
        self.freed: Callable[[int], None] | None = None  # gets the number of each record that dies
        self._going: list[int] = []  # members that are to go by plan, a few at a time
        self._going_bytes = 0
        self.plan_bytes = 0  # of a step that go by plan
        self._planned_bytes = 0  # of them, that have been saved in this step
        self.replay_bytes = 0  # that a block may have in memory again, which is not read ahead into
        self.trial_bytes = 0  # for the copies and the second run of a block that is tried, of a budget that was set
        self.passed = Passed()  # only under a budget that was set; free memory leaves it out already
        self._by_plan = False  # of this step: what a plan lets stay is not sent while others are on the way

    def add(self, record: Record) -> None:
        """Hold a record whose operator has finished, and send the oldest where that is too much."""
        record.hold()
        self.members[record.number] = record.ref, record.nbytes
        self.nbytes += record.nbytes
        self._meet(record.plain_bytes)
        if self._adapts:
            self._devices.add(record.device)
            self._unseen_bytes += record.nbytes
            if self._unseen_bytes >= self._look_after_bytes:
                self.look_at_room()
        self.note()
        if record.goes:
            self._by_plan = True
            self._going.append(record.number)
            self._going_bytes += record.nbytes
            self._planned_bytes += record.nbytes
        self._make_room(record.goes)
        if self.nbytes > self._counters.held_bytes:
            self._counters.held_bytes = self.nbytes
        self.tell_progress()

    def hold_again(self, record: Record) -> None:
        """Hold a record that backward has had and its graph still owns; it is the first to go."""
        self.members[record.number] = record.ref, record.nbytes
        self.members.move_to_end(record.number, last=False)
        self.nbytes += record.nbytes

    @property
    def in_memory_bytes(self) -> int:
        """Bytes that saved tensors hold in memory: let pass, held, on their way out, read back."""
        return self.passed.nbytes + self.nbytes + self._mover.staging.bytes + self.brought_bytes

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes may stay without a record, beside what graphs that are not freed hold."""
        held_bytes = self.in_memory_bytes
        return not held_bytes or held_bytes + nbytes <= self._limit_bytes

    def count(self, packed: tuple[Any, ...], nbytes: int) -> None:
        """Count bytes that stay without a record, as long as their graph has them."""
        if type(packed) is Detached:
            self.passed.add(packed[0], nbytes)
        else:
            self.passed.add_leaf(packed[0], nbytes)
        self._meet(nbytes)
        self.note()

    def let_pass(self, packed: tuple[Any, ...], nbytes: int) -> None:
        """Count them, and wait where they are too much."""
        self.count(packed, nbytes)
        self._make_room(False)

    def _meet(self, nbytes: int) -> None:
        self._step_largest_bytes = max(self._step_largest_bytes, nbytes)
        self._largest_bytes = max(self._largest_bytes, nbytes)

    def tell_progress(self) -> None:
        """Say how far a long first micro-batch has come. Call it for each record that is saved or asked for."""
        if not self._counters.micro_batches:
            self._progress.look()

    def _make_room(self, goes: bool) -> None:
        """Send what is to go by plan, some of it at a time, and where that is too little the oldest.

        `goes`: there is more of it than before.
        """
        limit_bytes, beside_bytes = self._limit_bytes, self._beside_bytes
        over_bytes = self.nbytes + beside_bytes + (self._mover.staging.bytes if self.limited else 0) - limit_bytes
        if not (goes or over_bytes > 0):
            return
        staging_bytes = self._mover.limits.staging_bytes
        if self._going:
            least_bytes = policy.planned_burst_bytes(limit_bytes, self.plan_bytes, staging_bytes)
            enough = self._going_bytes >= least_bytes or self._planned_bytes >= self.plan_bytes
            if enough or over_bytes > 0:
                self._send_going()
        if over_bytes > 0:
            if over_bytes > self._mover.staging.bytes or not self._by_plan:
                self._send(limit_bytes - beside_bytes - policy.write_burst_bytes(limit_bytes, staging_bytes))
            self._wait_below_limit()

    def send_all(self) -> None:
        """Send what is held, unless it stays because memory has room for it."""
        if not self._adapts:
            self._send(0)

    def end_step(self) -> None:
        """Look at memory anew in the next step."""
        self._unseen_bytes = self._look_after_bytes
        self._going, self._going_bytes, self._planned_bytes, self._by_plan = [], 0, 0, False
        self._step_largest_bytes = 0
        self.passed.end_step()

    def bury(self, remains: Remains) -> None:
        """Forget a record that has died."""
        _, nbytes = self.members.pop(remains.number, (None, 0))
        self.nbytes -= nbytes
        if self.freed is not None:
            self.freed(remains.number)
        if self._mover.recorder.trace is not None:
            self.note()

    def _send(self, budget_bytes: int) -> None:
        while self.members and self.nbytes > budget_bytes:
            self._send_one(next(iter(self.members)))

    def _send_going(self) -> None:
        going, self._going, self._going_bytes = self._going, [], 0
        for number in going:
            if number in self.members:
                self._send_one(number)

    def _send_one(self, number: int) -> None:
        reference, nbytes = self.members.pop(number)
        self.nbytes -= nbytes
        record = reference()
        if record is None:
            return
        self._counters.kept_to_offloaded(record.set_offloaded(True), policy.FITS)
        why_not = self._mover.send(record)
        if why_not is not None:
            self._counters.kept_to_offloaded(record.set_offloaded(False), why_not)

    def _wait_below_limit(self) -> None:
        """Let forward wait while what is held and what is on its way out exceed a budget that was set."""
        staging = self._mover.staging
        room_bytes = max(0, self._limit_bytes - self._beside_bytes - self.nbytes)
        if self.limited and not staging.has_room(0, room_bytes):
            begun_s, begun = time.perf_counter(), self._mover.cost.begin_wait()
            staging.wait_for_room(0, room_bytes)
            ended_s = time.perf_counter()
            self._mover.cost.wait(ended_s - begun_s, begun)
            self._counters.backpressure_s += ended_s - begun_s
            self._mover.recorder.note("room", begun_s, ended_s, 0, "")

    @property
    def _beside_bytes(self) -> int:
        """Bytes of a budget that was set which cannot be sent: let pass, or read back for a graph that lives on."""
        return self.passed.nbytes + self.brought_bytes if self.limited else 0

    @property
    def _limit_bytes(self) -> int:
        """Bytes that may be held; of a budget that was set, with those on their way out.

        One of the largest tensors of such a budget is left free: it is there before a hook hears of it.
        """
        if not self._adapts:
            return self._mover.window_bytes
        by_plan_bytes = self.plan_largest_bytes and max(self.plan_largest_bytes, self._step_largest_bytes)
        left_bytes = self._room_bytes - (by_plan_bytes or self._largest_bytes) - self.trial_bytes
        return max(0, left_bytes) if self.limited else self._room_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that may be read ahead now."""
        if not self._adapts:
            return self._mover.window_bytes - self.nbytes
        if not self.limited:
            return self._mover.read_ahead_bytes  # the reserve has room for it
        return self._limit_bytes - self.passed.nbytes - self.replay_bytes - self._mover.staging.bytes - self.nbytes

    def note(self, twice_bytes: int = 0) -> None:
        """Note the bytes that saved tensors hold in memory; `twice_bytes` of the sum are counted twice."""
        nbytes = self.in_memory_bytes - twice_bytes
        if nbytes > self._counters.peak_bytes:
            self._counters.peak_bytes = nbytes
        if self._mover.recorder.trace is not None:
            now_s = time.perf_counter()
            self._mover.recorder.note("held", now_s, now_s, nbytes, "")
        if self.told is not None:
            self.told(nbytes)

    def may_peak(self) -> bool:
        """Whether `note` would have something to tell, or might."""
        if self.told is not None or self._mover.recorder.trace is not None:
            return True
        return self.in_memory_bytes > self._counters.peak_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that memory had room for when it was looked at, where the budget adapts."""
        return self._room_bytes

    def look_at_room(self) -> int:
        """Look at memory; returns the bytes it has room for, of what is held and of what may be."""
        self._unseen_bytes = 0
        if self._config.memory_budget is not None:
            self._room_bytes = int(self._config.memory_budget)
        elif self._devices:
            self._room_bytes = min(
                _limits.hold_budget_bytes(self.nbytes, *self._free_and_reserve_bytes(each)) for each in self._devices
            )
            self._look_after_bytes = look_after_bytes(self._room_bytes, self.nbytes)
        return self._room_bytes

    def _free_and_reserve_bytes(self, device: torch.device) -> tuple[int, int]:
        model, pressure, limits = self._model(), self._mover.pressure, self._mover.limits
        weights = list(model.parameters()) if model is not None else []
        coming = sum(p.nbytes for p in weights if p.requires_grad and p.grad is None and p.device == device)
        if device.type == "cpu":
            return pressure.free_bytes(), pressure.reserve_bytes + coming
        rest = device_memory.total_bytes(device) // 16
        return device_memory.free_bytes(device), limits.staging_bytes + limits.window_bytes + rest + coming
