"""Storages that a block saves and code after it saves again belong to none: plans find them whatever recomputes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from support.planned import ROWS, SLOW, WIDTH, Block, Training, assert_equal, departures, follow, train
from tba import Offloader
from tba._auto.execution import Execution
from tba._record.record import Record


class Rectified(nn.Module):
    """Its result is saved by its own last operator, and again by what it is given to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        inner = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return torch.relu(x + (inner if scale is None else inner * scale))


def held_bytes(auto: Callable[..., Offloader], training: Training, **given: Tensor) -> int:
    """Bytes that a step of the same training holds where there is room for all."""
    training = training.again()
    kept = auto(training.model, memory_budget="1GiB")
    train(kept, training, steps=1, **given)
    return kept.stats().held_bytes


@pytest.mark.parametrize("share", [0.5, 0.75])
@pytest.mark.parametrize("shares", [False, True], ids=["result", "given to all"])
def test_a_plan_is_kept_to(auto: Callable[..., Offloader], share: float, shares: bool) -> None:
    scale = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)) if shares else None
    given = {"scale": scale * 1.0} if scale is not None else {}
    training = Training(Rectified)
    budget = int(share * held_bytes(auto, training, **given))
    offload = auto(training.model, memory_budget=budget, derive=False, **SLOW)
    plans = follow(offload, training, 8, **given)
    assert_equal(training.state(), train(None, Training(Rectified), steps=8, **given))
    assert not departures(plans)
    assert any(plan and 0 < len(plan.recomputed) < len(plan.facts.blocks) for plan in plans)


class _Masks(nn.Module):
    """Blocks that all save what no argument gives them: a mask that the model makes for each forward."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.masks: list[Tensor] = []
        self.layers = nn.ModuleList(_Masked(self.masks) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        self.masks[:] = [torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)) * 1.0]
        for layer in self.layers:
            x = layer(x)
        return x


class _Masked(Block):
    def __init__(self, masks: list[Tensor]) -> None:
        super().__init__()
        self.masks = masks

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x, self.masks[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0.5, 0.75])
@pytest.mark.parametrize("rates", [{}, SLOW], ids=["fast", "slow"])
def test_what_blocks_share_beside_their_arguments_hides_nothing_else(
    auto: Callable[..., Offloader], share: float, rates: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, sent = Training(partial(_Masks, 6), layers=1), list[int]()
    saved = Execution.saved
    monkeypatch.setattr(Execution, "saved", lambda execution, record: noted(saved(execution, record), record))

    def noted(goes: bool, record: Record) -> bool:
        sent.extend([record.plain_bytes] * goes)
        return goes

    offload = auto(ours.model, memory_budget=int(share * held_bytes(auto, ours)), blocks=_Masked, **rates)
    plans = [offload.plan]
    for number in range(8):
        before, plan = sum(sent), offload.plan
        plans += follow(offload, ours, 1, first=number)
        assert sum(sent) - before == (0 if not plan else sum(plan.sends.values()))
    assert_equal(ours.state(), train(None, ours.again(), steps=8))
    assert plans[-1]
    assert not departures(plans)
