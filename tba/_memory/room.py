"""Room: bytes that memory has for saved tensors: the budget that was set, or what is free beside a reserve.

Free memory is read as it fills: after every few megabytes, less often the more there is.

Wants the engine's lock held.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .._device import memory as device_memory
from .limits import Limits, hold_budget_bytes
from .pressure import LOOK_EVERY_BYTES, Pressure, look_after_bytes


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

    def fill(self, nbytes: int, device: torch.device, held_bytes: int) -> None:
        """Note a record that is held from now on, one of `held_bytes` in all; look at memory if it is time."""
        self._devices.add(device)
        self._unseen_bytes += nbytes
        if self._unseen_bytes >= self._look_after_bytes:
            self.look(held_bytes)

    def look_soon(self) -> None:
        """Look at memory with the next record."""
        self._unseen_bytes = self._look_after_bytes

    def look(self, held_bytes: int) -> int:
        """Look at memory, in which `held_bytes` are held; returns the bytes it has room for, those included."""
        self._unseen_bytes = 0
        if self._budget_bytes is not None:
            self.nbytes = int(self._budget_bytes)
        elif self._devices:
            free = map(self._free_and_reserve_bytes, self._devices)
            self.nbytes = min(hold_budget_bytes(held_bytes, *each) for each in free)
            self._look_after_bytes = look_after_bytes(self.nbytes, held_bytes)
        return self.nbytes

    def _free_and_reserve_bytes(self, device: torch.device) -> tuple[int, int]:
        model, pressure, limits = self._model(), self._pressure, self._limits
        weights = list(model.parameters()) if model is not None else []
        coming = sum(p.nbytes for p in weights if p.requires_grad and p.grad is None and p.device == device)
        if device.type == "cpu":
            return pressure.free_bytes(), pressure.reserve_bytes + coming
        rest = device_memory.total_bytes(device) // 16
        return device_memory.free_bytes(device), limits.staging_bytes + limits.window_bytes + rest + coming
