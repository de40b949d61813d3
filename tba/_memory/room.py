"""Room: bytes that memory has for saved tensors: the budget that was set, or what is free beside a reserve.

Free memory is read as it fills: after every few megabytes, less often the more there is.

Beside saved tensors a device needs memory for what operators make and drop. How much is learned from the steps in which
the device's peak rose: what was in use then, less what was there when the step began, what its gradients take, and what
saved tensors held at most.

Wants the engine's lock held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from .._device import memory as device_memory
from .limits import Limits, device_reserve_bytes, hold_budget_bytes
from .pressure import LOOK_EVERY_BYTES, Pressure, look_after_bytes


class _Begun(NamedTuple):
    """A device as a step began: bytes in use beside saved tensors, with gradients to come, and its peak until then."""

    at_rest_bytes: int
    peak_bytes: int


class Room:
    """Room for held records.

    Attributes:
        nbytes: of it, when memory was last looked at.
    """

    def __init__(
        self, budget_bytes: int | None, limits: Limits, pressure: Pressure, model: Callable[[], nn.Module | None]
    ) -> None:
        self.nbytes = 0
        self._budget_bytes = budget_bytes
        self._limits = limits
        self._pressure = pressure
        self._model = model
        self._devices: set[torch.device] = set()  # of what was held so far: the one with least room decides
        self._unseen_bytes = self._look_after_bytes = LOOK_EVERY_BYTES  # held since the last look, and until the next
        self._begun: dict[torch.device, _Begun] = {}  # in this step
        self._transient_bytes: dict[torch.device, int] = {}

    def fill(self, nbytes: int, device: torch.device) -> bool:
        """Note a record that is held from now on; returns whether it is time to look at memory."""
        self._devices.add(device)
        self._unseen_bytes += nbytes
        return self._unseen_bytes >= self._look_after_bytes

    def end_step(self, saved_peak_bytes: int) -> None:
        """Learn from a step in which saved tensors held so many bytes at most; look at memory with the next record."""
        self._unseen_bytes = self._look_after_bytes
        for device, begun in self._begun.items() if len(self._devices) == 1 else ():  # else that is of several together
            peak_bytes = device_memory.figures(device).peak_bytes
            if peak_bytes > begun.peak_bytes:
                known_bytes = self._transient_bytes.get(device, 0)
                seen_bytes = peak_bytes - begun.at_rest_bytes - saved_peak_bytes
                self._transient_bytes[device] = max(seen_bytes, known_bytes - known_bytes // 8)
        self._begun.clear()

    def look(self, held_bytes: int, saved_bytes: int) -> int:
        """Look at memory; returns the bytes it has room for, those held included.

        Args:
            held_bytes: of records that are held.
            saved_bytes: of all saved tensors in memory.
        """
        self._unseen_bytes = 0
        if self._budget_bytes is not None:
            self.nbytes = int(self._budget_bytes)
        elif self._devices:
            free = [self._free_and_reserve_bytes(device, saved_bytes) for device in self._devices]
            self.nbytes = min(hold_budget_bytes(held_bytes, *each) for each in free)
            self._look_after_bytes = look_after_bytes(self.nbytes, held_bytes)
        return self.nbytes

    def _free_and_reserve_bytes(self, device: torch.device, saved_bytes: int) -> tuple[int, int]:
        model, pressure = self._model(), self._pressure
        weights = list(model.parameters()) if model is not None else []
        coming = sum(p.nbytes for p in weights if p.requires_grad and p.grad is None and p.device == device)
        if device.type == "cpu":
            return pressure.free_bytes(), pressure.reserve_bytes + coming
        found = device_memory.figures(device)
        if device not in self._begun:
            self._begun[device] = _Begun(found.active_bytes - saved_bytes + coming, found.peak_bytes)
        transient_bytes = self._transient_bytes.get(device)
        reserve_bytes = device_reserve_bytes(self._limits, device_memory.total_bytes(device), transient_bytes)
        return found.free_bytes, reserve_bytes + coming
