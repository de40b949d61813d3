"""Inputs of blocks that recompute, moved by plan: a budget below what full checkpointing holds, on a slow link."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from support.clock import Counted
from support.planned import ROWS, WIDTH, Block, Training, assert_equal, departures, follow, train
from tba import offload_context
from tba._plan import clock

LAYERS, INPUT_BYTES = 24, ROWS * WIDTH * 4
# Full checkpointing holds the inputs of all blocks, and what one of them saves, which is 11 times its input.
BUDGET = (LAYERS + 11) * INPUT_BYTES * 7 // 10


@pytest.fixture(autouse=True)
def _a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "current", Counted(rate=1 << 26))


def test_inputs_of_blocks_that_recompute_move_and_come_back_bit_for_bit(scratch: Path) -> None:
    training = Training(layers=LAYERS)
    offload = offload_context(
        training.model, "auto", memory_budget=BUDGET, min_tensor_bytes=4096, derive=False, storage_paths=scratch
    )
    before = written = 0
    plans = []
    for number in range(10):
        plans += follow(offload, training, 1, first=number)
        before, written = written, offload.stats().written_bytes
    offload.close()
    assert_equal(training.state(), train(None, training.again(), steps=10))
    plan = plans[-1]
    assert plan
    assert departures(plans) == 0
    assert len(plan.recomputed) >= LAYERS - 1
    assert 0 < sum(plan.inputs.values()) <= sum(plan.sends.values()) <= 2 * LAYERS * INPUT_BYTES
    # Files hold whole blocks; what backward asks for while it is still in memory is not written.
    assert 0 < written - before <= 1.05 * sum(plan.sends.values()) + 4096 * len(plan.sends)
    assert plan.measured is not None
    assert plan.measured.peak_bytes <= BUDGET


class Sliced(nn.Module):
    """Each block is given all rows but the first of what the one before has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x[1:])
        return x


@pytest.mark.parametrize("how", ["slices", "small"])
def test_inputs_that_cannot_move_are_not_planned_to(how: str, scratch: Path) -> None:
    training = Training(layers=LAYERS)
    if how == "slices":
        training.model = cast(Any, Sliced())
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.05)
    least_bytes = INPUT_BYTES + 4096 if how == "small" else 4096
    offload = offload_context(
        training.model,
        "auto",
        memory_budget=BUDGET,
        min_tensor_bytes=least_bytes,
        derive=False,
        storage_paths=scratch,
    )
    plan = follow(offload, training, 7)[-1]
    stats = offload.stats()
    offload.close()
    assert plan
    assert plan.recomputed
    assert plan.inputs == {}
    assert plan.measured is not None
    kept_bytes = sum(plan.facts.blocks[block].input_bytes for block in plan.recomputed)
    assert kept_bytes <= plan.measured.peak_bytes <= BUDGET
    assert stats.written_bytes > 0


def test_an_input_that_is_edited_after_its_block_is_refused_as_pytorch_does(scratch: Path) -> None:
    training = Training(layers=LAYERS)
    offload = offload_context(
        training.model, "auto", memory_budget=BUDGET, min_tensor_bytes=4096, derive=False, storage_paths=scratch
    )
    follow(offload, training, 6)
    assert offload.plan
    assert offload.plan.inputs
    edited = []

    def edit(_: object, given: tuple[torch.Tensor, ...], __: object) -> None:
        with torch.no_grad():
            edited.append(given[0].add_(1.0))

    handle = training.model.layers[12].register_forward_hook(edit)
    with offload, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        training.step(number=6)
    handle.remove()
    assert edited
    offload.close()
