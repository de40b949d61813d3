"""Write-behind: records whose operator has finished and which stay in memory for now, oldest first, within a budget.

What was saved last is wanted first. Tier `nvme` and `cpu` therefore hold back as much as read-ahead may take later
anyway: at the turn from forward to backward it is in memory, and a write of it is never begun. Tier `auto` holds
whatever memory can spare, and looks again at how much that is as it fills. Over budget, the oldest goes first: it is
needed last.

Wants the engine's lock held.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from .. import _policy
from .._config import OffloadConfig
from .._memory import free_memory
from .._memory import limits as _limits
from .._memory.pressure import LOOK_EVERY_BYTES
from .._record.record import Record, Remains
from .._stats import Counters
from .._transfer.mover import Mover


class WriteBehind:
    """Queue of records on their way out, as slow as memory allows."""

    def __init__(
        self, config: OffloadConfig, mover: Mover, counters: Counters, model: Callable[[], nn.Module | None]
    ) -> None:
        self.nbytes = 0
        self._config = config
        self._mover = mover
        self._counters = counters
        self._model = model
        self.members: dict[int, tuple[weakref.ref[Record], int]] = {}  # by number, oldest first: bytes of each
        self._adapts = config.tier == "auto"
        self._devices: set[torch.device] = set()  # of what was held so far: the one with least room left decides
        self._room_bytes = 0  # where the budget adapts: what memory had room for when it was looked at
        self._unseen_bytes = LOOK_EVERY_BYTES  # where the budget adapts: saved since memory was looked at

    def add(self, record: Record) -> None:
        """Hold a record whose operator has finished, and send the oldest where that is too much."""
        record.hold()
        self.members[record.number] = record.ref, record.nbytes
        self.nbytes += record.nbytes
        if self._adapts:
            self._devices.add(record.device)
            self._unseen_bytes += record.nbytes
            if self._unseen_bytes >= LOOK_EVERY_BYTES:
                self.look_at_room()
        budget_bytes = self._room_bytes if self._adapts else self._mover.window_bytes
        if self.nbytes > budget_bytes:
            staging_bytes = self._mover.limits.staging_bytes
            self._send(budget_bytes - _limits.write_burst_bytes(budget_bytes, staging_bytes))
        if self.nbytes > self._counters.held_bytes:
            self._counters.held_bytes = self.nbytes

    def send_all(self) -> None:
        """Send what is held, unless it stays because memory has room for it."""
        if not self._adapts:
            self._send(0)

    def end_step(self) -> None:
        """Look at memory anew in the next step."""
        self._unseen_bytes = LOOK_EVERY_BYTES

    def bury(self, remains: Remains) -> None:
        """Forget a record that has died."""
        _, nbytes = self.members.pop(remains.number, (None, 0))
        self.nbytes -= nbytes

    def _send(self, budget_bytes: int) -> None:
        while self.members and self.nbytes > budget_bytes:
            reference, nbytes = self.members.pop(next(iter(self.members)))
            self.nbytes -= nbytes
            record = reference()
            if record is None:
                continue
            self._counters.kept_to_offloaded(record.set_offloaded(True), _policy.FITS)
            why_not = self._mover.send(record)
            if why_not is not None:
                self._counters.kept_to_offloaded(record.set_offloaded(False), why_not)

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
        return self._room_bytes

    def _free_and_reserve_bytes(self, device: torch.device) -> tuple[int, int]:
        model, pressure, limits = self._model(), self._mover.pressure, self._mover.limits
        weights = list(model.parameters()) if model is not None else []
        coming = sum(p.nbytes for p in weights if p.requires_grad and p.grad is None and p.device == device)
        if device.type == "cpu":
            return pressure.free_bytes(), pressure.reserve_bytes + coming
        rest = free_memory.device_total_bytes(device) // 16
        return free_memory.device_free_bytes(device), limits.staging_bytes + limits.window_bytes + rest + coming
