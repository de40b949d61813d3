"""Course: once a plan stands, only what moves has records; what departs from the step written down is found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.exactness import assert_bit_equal
from support.models import Residual
from support.planned import gradients, records
from tba import Offloader
from tba._auto.course import SMALL, Course, Entry

ROWS, WIDTH, LAYERS = 64, 64, 8
LAYER_BYTES = ROWS * WIDTH * 4


class Model(nn.Module):
    """Layers, and as many more sines in the middle of them as its attribute says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Residual(WIDTH) for _ in range(LAYERS))
        self.sines = 0

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            for _ in range(self.sines if number == LAYERS // 2 else 0):
                x = x.sin()
        return x.square().mean()


Auto = Callable[..., Offloader]


def _step(model: nn.Module, offload: Offloader | None, seed: int = 0) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    x = torch.randn(ROWS, WIDTH)
    with offload or nullcontext():
        model(x).backward()
    return gradients(model)


def _course(offload: Offloader) -> list[Entry] | None:
    assert offload._saver.planner is not None
    return next((kind.course for kind in offload._saver.planner.kinds if kind.plan), None)


@pytest.fixture
def followed(auto: Auto) -> Callable[..., tuple[Model, Offloader]]:
    """Gives a model and its offloader after a step has been written down."""

    def make(layers: int = 20, **settings: Any) -> tuple[Model, Offloader]:
        model = Model()
        offload = auto(model, memory_budget=layers * LAYER_BYTES, blocks=Residual, **settings)
        for seed in range(20):
            _step(model, offload, seed)
            if _course(offload) is not None:
                return model, offload
        raise AssertionError(str(offload.plan))

    return make


def test_only_what_moves_hasrecords(followed: Callable[..., tuple[Model, Offloader]]) -> None:
    model, offload = followed()
    plain = Model()
    for seed in range(6):
        if (entries := _course(offload)) is None:  # the plan was changed
            _step(model, offload, seed)
            continue
        plan, before, stats = offload.plan, records(offload), offload.stats()
        assert plan
        assert_bit_equal(_step(model, offload, seed), _step(plain, None, seed))
        made = records(offload) - before
        assert made == len({entry.first for entry in entries if entry.moves})
        assert made >= len(plan.sends)
        kept = sum(entry.kept_bytes for entry in entries)
        assert offload.stats().kept_bytes - stats.kept_bytes >= kept > 0
        assert offload.stats().peak_bytes <= 20 * LAYER_BYTES
        return
    raise AssertionError("no plan stood for two steps")


def test_small_tensors_now_and_then_change_nothing(followed: Callable[..., tuple[Model, Offloader]]) -> None:
    model, offload = followed()
    small = torch.ones(3, requires_grad=True)
    for seed in range(6):
        if seed % 2:
            model.layers[0].one.register_forward_hook(lambda *_: None if small.sin().exp().requires_grad else 1)
        _step(model, offload, seed)
    offload.stats()
    assert all(not kind.departures for kind in offload._saver.planner.kinds)  # type: ignore[union-attr]


@pytest.mark.parametrize("sines", [1, 12])
def test_a_step_that_departs_is_exact_and_within_the_budget(
    sines: int, followed: Callable[..., tuple[Model, Offloader]]
) -> None:
    model, offload = followed()
    plain = Model()
    model.sines = plain.sines = sines
    assert _course(offload) is not None
    assert_bit_equal(_step(model, offload, 1), _step(plain, None, 1))
    assert _course(offload) is None
    stood = False
    for seed in range(8):
        assert_bit_equal(_step(model, offload, seed), _step(plain, None, seed))
        stood = stood or bool(offload.plan and offload.plan.measured is not None)  # not made anew just now
    assert stood
    assert offload.stats().peak_bytes <= 20 * LAYER_BYTES


def test_an_edit_of_what_was_let_pass_is_found(followed: Callable[..., tuple[Model, Offloader]]) -> None:
    model, offload = followed()
    kept: list[Tensor] = []
    model.layers[-1].one.register_forward_hook(lambda module, args, out: kept.append(args[0]))
    with offload:
        loss = model(torch.randn(ROWS, WIDTH))
        with torch.no_grad():
            kept[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_graphs_that_are_kept_and_gradients_of_gradients(followed: Callable[..., tuple[Model, Offloader]]) -> None:
    model, offload = followed()
    plain = Model()

    def twice(model: Model, offload: Offloader | None) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        parameters = list(model.parameters())
        if offload is not None:
            offload.__enter__()
        loss = model(x)
        once = torch.autograd.grad(loss, parameters, retain_graph=True)
        again = torch.autograd.grad(loss, parameters, create_graph=True)
        beyond = torch.autograd.grad(sum(each.square().sum() for each in again), parameters)  # type: ignore[arg-type]
        if offload is not None:
            offload.__exit__(None, None, None)
        return [*once, *(each.detach() for each in again), *beyond]

    for _ in range(3):
        assert_bit_equal(twice(model, offload), twice(plain, None))


def test_a_traced_step_has_all_itsrecords(followed: Callable[..., tuple[Model, Offloader]]) -> None:
    model, offload = followed()
    before = records(offload)
    with offload.trace() as events:
        _step(model, offload)
    saved = [event for event in events if event.kind == "saved"]
    assert len(saved) == records(offload) - before > len([e for e in _course(offload) or () if e.moves])


def test_a_default_device_leaves_plans_alone(auto: Auto) -> None:
    model, plain = Model(), Model()
    offload = auto(model, memory_budget=20 * LAYER_BYTES, blocks=Residual)
    with torch.device("cpu"):  # a mode of torch functions
        for seed in range(10):
            assert_bit_equal(_step(model, offload, seed), _step(plain, None, seed))
    assert offload.plan
    assert _course(offload) is not None
    assert all(not kind.departures for kind in offload._saver.planner.kinds)  # type: ignore[union-attr]


@pytest.mark.parametrize("layers", [20, 14, 10])
def test_beside_a_graph_that_lives_on_nothing_is_let_pass(
    followed: Callable[..., tuple[Model, Offloader]], layers: int
) -> None:
    model, offload = followed(layers)
    before = records(offload)
    with offload:
        first = model(torch.randn(ROWS, WIDTH))
        first.backward(retain_graph=True)
        between = records(offload)
        second = model(torch.randn(ROWS, WIDTH))
        assert records(offload) - between > between - before
        second.backward()
        first.backward()
    assert offload.stats().peak_bytes <= layers * LAYER_BYTES  # what was read back for the first one counts


def test_a_backward_after_the_context_does_not_shift_the_next_step(
    followed: Callable[..., tuple[Model, Offloader]],
) -> None:
    model, offload = followed()
    for _ in range(4):
        with offload:
            loss = model(torch.randn(ROWS, WIDTH))
            loss.backward(retain_graph=True)
        loss.backward()
        del loss
    assert all(not kind.departures for kind in offload._saver.planner.kinds)  # type: ignore[union-attr]


def test_codecs_see_every_tensor(auto: Auto) -> None:
    model = Model()
    offload = auto(model, memory_budget=8 * LAYER_BYTES, compress="exact")
    for seed in range(8):
        _step(model, offload, seed)
    assert offload.plan
    assert _course(offload) is None


# -- by itself -----------------------------------------------------------------------------------------------------


def test_a_course_is_followed_by_sizes_and_shared_memory() -> None:
    entries = [Entry(256, False, 256, 0, 0), Entry(128, False, 0, 0, 64), Entry(256, True, 0, 2, 0)]
    course = Course(entries, 100)
    assert [course.next(256, 4096), course.next(128, 4160), course.next(256, 8192)] == entries
    assert course.next(256, 4096) is None  # one too many
    course = Course(entries, 100)
    course.next(256, 4096)
    assert course.next(128, 4096) is None  # other memory than it was
    assert Course(entries, 100).next(255, 4096) is None


def test_small_tensors_come_and_go() -> None:
    entries = [Entry(256, False, 256, 0, 0), Entry(64, False, 0, 0, 128)]
    course = Course(entries, 100)
    assert course.next(64, 1024) == SMALL
    assert course.next(256, 4096) == entries[0]
    assert course.next(64, 1024) == SMALL
    assert course.next(64, 4096 + 128) == entries[1]  # a slice
    assert course.next(64, 1024) == SMALL
