"""Plans and forwards that end early: by an interrupt, or without a backward."""

from __future__ import annotations

import copy
import gc
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.planned import ROWS, SLOW, WIDTH, Block, Training, departures, follow, saved_bytes, train
from tba import Offloader, attach


def test_a_copy_after_an_interrupted_forward_has_weights_of_its_own(scratch: Path) -> None:
    """PyTorch calls no closing hook of a module whose forward ended in a KeyboardInterrupt."""
    training = Training()
    offload = attach(training.model, memory_budget=int(0.4 * saved_bytes()), storage_paths=scratch, **SLOW)
    train(None, training)
    assert offload.plan
    assert offload.plan.recomputed

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    interrupting = training.model.head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        training.step(number=6)
    interrupting.remove()
    copied = copy.deepcopy(training.model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        assert not copied(torch.ones(ROWS, WIDTH)).any()
    assert all("forward" not in vars(module) for model in (training.model, copied) for module in model.modules())
    offload.close()


def test_an_interrupt_stops_the_block_that_runs(auto: Callable[..., Offloader]) -> None:
    went_on = []

    class Struck(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            if strikes:
                signal.raise_signal(signal.SIGINT)
                went_on.append(True)
            return super().forward(x)

    strikes = False
    training = Training(Struck)
    offload = auto(training.model, memory_budget=int(0.4 * saved_bytes()), **SLOW)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for number in range(6):  # surveyed, tried, by plan
            strikes = True
            with pytest.raises(KeyboardInterrupt), offload:
                training.step(number=number)
            strikes = False
            with offload:
                training.step(number=number)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not went_on


@pytest.mark.parametrize("step", [0, 1, 2])  # surveyed, watched, planned
def test_a_forward_without_a_backward_is_no_part_of_the_step_that_follows(
    auto: Callable[..., Offloader], step: int
) -> None:
    planned_bytes = set()
    for forwards in (0, 1):
        training = Training()
        offload = auto(training.model, memory_budget=int(0.4 * saved_bytes()), **SLOW)
        for number in range(6):
            with offload:
                for _ in range(forwards if number == step else 0):
                    training.model(torch.zeros(ROWS, WIDTH))
                training.step(number=number)
            if offload.plan:
                planned_bytes.add(offload.plan.facts.saved_bytes)
    assert len(planned_bytes) == 1


@pytest.mark.parametrize("raises", [False, True])
def test_a_forward_that_is_given_up_leaves_the_plan_as_it_is(auto: Callable[..., Offloader], raises: bool) -> None:
    """One whose loss is not finite, say, or that raises half way, in each step."""
    training = Training()
    offload = auto(training.model, memory_budget=int(0.4 * saved_bytes()), **SLOW)
    plans = follow(offload, training)
    plan = plans[-1]
    assert plan
    assert not plan.idle

    def fail(*_: Any) -> None:
        raise ArithmeticError("half way")

    for number in range(6, 10):
        with offload:
            failing = training.model.head.register_forward_pre_hook(fail) if raises else None
            with pytest.raises(ArithmeticError) if raises else nullcontext():
                training.model(torch.zeros(ROWS, WIDTH))
            if failing is not None:
                failing.remove()
                gc.collect()  # the error's frames hold the graph
            training.step(number=number)
        plans.append(offload.plan)
    assert not departures(plans)
    assert offload.plan
    assert offload.plan.decides_as(plan)
