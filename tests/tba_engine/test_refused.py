"""Blocks that would not repeat themselves in backward, and never recompute."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.planned import SLOW, Block, Training, assert_equal, follow, nothing, saved_bytes
from tba import Offloader
from tba._plan.plan import Plan


class Counting(Block):
    """Updates a buffer at each call, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class Random(Block):
    """Routes by a generator that nobody restores."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x) * DICE.choice([0.5, 0.6, 0.7, 0.8, 0.9])


class Shared(Block):
    """Routes by Python's own generator, which comes to one of two ways: half of its second runs are as the first."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x) * random.choice([0.5, 1.0])


class SharedNumPy(Block):
    """Routes by NumPy's."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x) * np.random.choice([0.5, 1.0])  # the shared one is what is meant


class Hooked(Block):
    """Is told something by a hook, for as long as its call lasts."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, _: setattr(module, "factor", 0.5))
        self.register_forward_hook(lambda module, *_: setattr(module, "factor", 1.0))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x) * self.factor


class Cached(Block):
    """Adds to what it is given, as a layer with a cache does."""

    def forward(self, x: Tensor, scale: Tensor | None = None, cache: Any = None) -> Tensor:
        cache.calls += 1
        return super().forward(x) * (1 + 0.01 * cache.calls)


class Cache:
    """A cache."""

    def __init__(self) -> None:
        self.calls = 0


DICE = random.Random(0)


def _run(training: Training, offload: Offloader | None) -> list[Tensor]:
    for seed in (DICE.seed, random.seed, np.random.seed):
        seed(3)
    for number in range(6):
        kwargs = {"cache": Cache()} if isinstance(training.model.layers[0], Cached) else {}
        with offload if offload is not None else nothing():
            training.step(number=number, **kwargs)
    return training.state()


def _plan(auto: Callable[..., Offloader], block: type[Block]) -> Plan:
    """The plan of a training that gives plain weights to the last bit."""
    training = Training(block)
    offload = auto(training.model, memory_budget=int(0.6 * saved_bytes()), **SLOW)
    assert_equal(_run(training, offload), _run(Training(block), None))
    assert offload.plan
    return offload.plan


REFUSALS: dict[type[Block], str] = {
    Counting: "it changes calls",
    Random: "it changes DICE",
    Shared: "it changes Python's random numbers",
    SharedNumPy: "it changes NumPy's random numbers",
}


@pytest.mark.parametrize("block", REFUSALS, ids=lambda block: block.__name__)
def test_a_block_that_would_not_repeat_itself_does_not_recompute(
    auto: Callable[..., Offloader], block: type[Block]
) -> None:
    plan = _plan(auto, block)
    assert not plan.recomputed
    assert REFUSALS[block] in {each.why_not for each in plan.facts.blocks}
    assert REFUSALS[block] in str(plan)


@pytest.mark.parametrize("block", [Hooked, Cached])
def test_a_block_recomputes_from_what_its_call_found_and_leaves_no_trace(
    auto: Callable[..., Offloader], block: type[Block]
) -> None:
    assert _plan(auto, block).recomputed


def test_a_block_that_saves_other_tensors_each_time_does_not_recompute(auto: Callable[..., Offloader]) -> None:
    """Its values do not tell: PyTorch's checkpoint would raise in the middle of a backward."""

    class Growing(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            more = 8 + torch._C._autograd._get_sequence_nr() % 13  # which no program can put back
            return super().forward(torch.cat([x, x[:more]]))[: len(x)]

    training = Training(Growing)
    offload = auto(training.model, memory_budget=int(0.6 * saved_bytes()), **SLOW)
    assert not any(plan and plan.recomputed for plan in follow(offload, training))
