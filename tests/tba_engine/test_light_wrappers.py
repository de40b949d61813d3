"""Wrapper subclasses in steps that only count, and in steps that follow a plan: by their one inner tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from support.exactness import assert_bit_equal
from support.models import Residual
from support.planned import gradients, records
from tba import Offloader

ROWS, WIDTH, LAYERS = 64, 64, 8
LAYER_BYTES = ROWS * WIDTH * 4

Auto = Callable[..., Offloader]
Wrap = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """Layers over a wrapped input; in the middle of them as many sines as its attribute says."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Residual(WIDTH) for _ in range(LAYERS))
        self.wrap = wrap
        self.sines = 0
        self.between: Callable[[Tensor], object] = lambda _: None

    def forward(self, x: Tensor) -> Any:
        x = self.wrap(x)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            for _ in range(self.sines if number == LAYERS // 2 else 0):
                x = x.sin()
        self.between(x)
        return x.square().mean()


@pytest.fixture
def dtensors(tmp_path: Path) -> Iterator[Callable[[], Model]]:
    """Gives a model whose activations and weights are DTensors, over a mesh of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def make() -> Model:
        model = Model(lambda x: DTensor.from_local(x, mesh, [Replicate()]))
        distribute_module(model, mesh)
        return model

    yield make
    dist.destroy_process_group()


def _step(model: Model, offload: Offloader | None, seed: int = 0) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    x = torch.randn(ROWS, WIDTH)
    with offload or nullcontext():
        model(x).backward()
    return [gradient.to_local() for gradient in gradients(model)]  # type: ignore[attr-defined]


def test_steps_that_fit_are_only_counted(dtensors: Callable[[], Model], auto: Auto) -> None:
    model, plain = dtensors(), dtensors()
    offload = auto(model, memory_budget=100 * LAYER_BYTES)
    _step(model, offload)
    made, kept_bytes = records(offload), offload.stats().kept_bytes
    assert made >= 3 * LAYERS
    for seed in range(4):
        assert_bit_equal(_step(model, offload, seed), _step(plain, None, seed))
    assert records(offload) == made
    assert offload.stats().kept_bytes == 5 * kept_bytes


def test_a_counted_step_that_saves_more_stays_within_the_budget(dtensors: Callable[[], Model], auto: Auto) -> None:
    model, plain = dtensors(), dtensors()
    offload = auto(model, memory_budget=40 * LAYER_BYTES)
    for seed in range(3):
        _step(model, offload, seed)
    assert offload.stats().offloaded_bytes == 0
    model.sines = plain.sines = 30
    assert_bit_equal(_step(model, offload), _step(plain, None))
    assert offload.stats().offloaded_bytes > 0
    assert offload.stats().peak_bytes <= 40 * LAYER_BYTES


def test_a_planned_step_is_followed_and_only_what_moves_has_records(dtensors: Callable[[], Model], auto: Auto) -> None:
    model, plain = dtensors(), dtensors()
    offload = auto(model, memory_budget=20 * LAYER_BYTES)
    followed = 0
    for seed in range(24):
        planner = offload._saver.planner
        assert planner is not None
        course = next((kind.course for kind in planner.kinds if kind.plan), None)
        before = records(offload)
        assert_bit_equal(_step(model, offload, seed), _step(plain, None, seed))
        if course is not None:
            followed += 1
            assert records(offload) - before == len({entry.first for entry in course if entry.moves})
    assert followed
    assert offload.plan
    assert offload.stats().offloaded_bytes > 0
    assert offload.stats().peak_bytes <= 20 * LAYER_BYTES


@pytest.mark.parametrize("layers", [100, 20], ids=["counted", "planned"])
def test_an_edit_of_what_was_let_pass_is_found(layers: int, dtensors: Callable[[], Model], auto: Auto) -> None:
    model = dtensors()
    offload = auto(model, memory_budget=layers * LAYER_BYTES)
    for seed in range(12):
        _step(model, offload, seed)

    def edit(x: Tensor) -> None:
        with torch.no_grad():
            x.mul_(2)

    model.layers[-1].register_forward_hook(lambda module, args, out: out.tanh())  # which saves it
    model.between = edit
    with offload:
        loss = model(torch.randn(ROWS, WIDTH))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_wrapper_around_two_tensors_ends_counting(auto: Auto) -> None:
    def run(offload: Offloader | None) -> Any:
        torch.manual_seed(0)
        x: Any = TwoTensor(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)).requires_grad_()
        with offload or nullcontext():
            module(x).backward()
        return [x.grad.a, x.grad.b]

    module = nn.Sequential(nn.Sigmoid(), nn.Tanh(), nn.Flatten(0))
    module.append(_Sum())
    offload = auto(module, memory_budget=100 * LAYER_BYTES)
    expected = run(None)
    made = []
    for _ in range(3):
        assert_bit_equal(run(offload), expected)
        made.append(records(offload))
    assert made[0] > 0
    assert made == [made[0], 2 * made[0], 3 * made[0]]


class _Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()
