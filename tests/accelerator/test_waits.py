"""Waits of a host that is ahead of its device: no loss, as long as the device has work."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from support.models import Waves
from tba import offload_context
from tba._blocks.timeline import Timeline
from tba._plan import clock

MIB = 1 << 20
LAYERS, NBYTES = 24, 2 * MIB


class Slow(clock.Clock):
    """Each wait of the host counts for 100 s."""

    waits = 0

    def waited_s(self, seconds: float) -> float:
        self.waits += 1
        return 100.0


def test_a_host_that_waits_for_a_device_behind_it_is_no_slow_link(
    sim: ModuleType, device: torch.device, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Slow()
    monkeypatch.setattr(clock, "current", waiting)
    monkeypatch.setattr(Timeline, "step", lambda self: (1.0, 0.0))  # the device was never idle
    model, x = Waves(LAYERS, NBYTES).to(device), torch.linspace(-1, 1, NBYTES // 4, device=device)
    settings = {"memory_budget": 16 * MIB, "min_tensor_bytes": 0, "staging_bytes": NBYTES, "storage_paths": scratch}
    offload = offload_context(model, **settings)
    for _ in range(8):
        model.zero_grad()
        with offload:
            model(x).backward()
        assert offload.plan is None or offload.plan.predicted.step_s < 50
    sim.synchronize()
    assert offload.plan
    assert offload.plan.sends
    assert waiting.waits
    offload.close()
