"""The campaign of signals, a short one, and that it sees what it looks for.

`python -m tests.campaigns signals --count 3000` is the long one.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from campaigns.signals import trainee as trainee_module
from campaigns.signals.command import run_signals
from campaigns.signals.trainee import KINDS, Case, Struck, Trainee, run_case
from support.engine import engine


def test_random_signals_leave_every_step_exact_and_every_error_told(scratch: Path) -> None:
    result = run_signals(0, 200, path=scratch)
    assert result.data["bad"] == []
    counts = result.data["counts"]
    assert sum(each["signals"] for each in counts.values()) == 200
    assert sum(each["raised"] for each in counts.values()) > 20
    assert all(counts[kind]["programs"] for kind in KINDS)


class _Swallows(nn.Module):
    """Takes what a handler raises for an error of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        while True:
            try:
                for _ in range(20):
                    out = self.model(x)
            except Struck:
                continue
            return out  # type: ignore[no-any-return]


def _case(kind: str) -> Case:
    return Case(kind, int(signal.SIGUSR1), attached=False, inside=True, flushes=False)


def test_the_campaign_sees_an_error_that_is_swallowed(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainee_module, "_SILENT_S", 0.5)
    trainee = Trainee()
    trainee.model = _Swallows(trainee.model)  # type: ignore[assignment]
    run = run_case(trainee, _case("raises"), lambda model: engine(scratch, model=model), random.Random(0))
    assert any("the program never gets" in each for each in run.wrong)
    assert len(run.raised) > len(run.caught)


def test_the_campaign_sees_other_gradients(scratch: Path) -> None:
    trainee = Trainee()
    trainee.expected[1] = [torch.zeros_like(each) for each in trainee.expected[1]]
    trainee.probe_expected = [each + 1 for each in trainee.probe_expected]
    run = run_case(trainee, _case("trains"), lambda model: engine(scratch, model=model), random.Random(0))
    assert "what the handler trained has other gradients" in run.wrong
    assert any(each.startswith("step ") for each in run.wrong)
