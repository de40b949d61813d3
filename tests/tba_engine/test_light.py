"""Light hooks: under a budget that holds, steps are only counted, and one that saves more still stays within it."""

from __future__ import annotations

import gc
import weakref
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from support.exactness import assert_bit_equal
from support.models import Made
from support.planned import WAYS, records, step, used
from tba import Offloader

ROWS, WIDTH = 64, 32
LAYER_BYTES = ROWS * WIDTH * 4


class Model(nn.Module):
    """As many passes over its layers as its attribute says, which no argument shows."""

    def __init__(self, passes: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.passes = passes
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.passes):
            x = self.dropout(self.layers(x))
        return x.square().sum()


def _used(how: str, model: nn.Module, scratch: Path, **settings: Any) -> AbstractContextManager[Offloader]:
    return used(how, model, scratch, **({"memory_budget": 64 * LAYER_BYTES} | settings))


def _step(how: str, offload: Offloader | None, model: nn.Module, rows: int = ROWS) -> list[Tensor]:
    return step(how, offload, model, rows, WIDTH)


def _steps(offload: Offloader, model: nn.Module, count: int = 3) -> None:
    for _ in range(count):
        _step("attach", offload, model)


EACH_WAY = pytest.mark.parametrize("how", WAYS)


@EACH_WAY
def test_steps_that_fit_a_budget_make_norecords(how: str, scratch: Path) -> None:
    model = Model()
    expected = _step("attach", None, model)
    with _used(how, model, scratch) as offload:
        assert_bit_equal(_step(how, offload, model), expected)
        made = records(offload)
        assert made
        kept_bytes = offload.stats().kept_bytes
        saved = [offload.stats().saved_bytes]
        for _ in range(5):
            assert_bit_equal(_step(how, offload, model), expected)
            saved.append(offload.stats().saved_bytes)
        assert records(offload) == made
        assert [after - before for before, after in pairwise(saved)] == [kept_bytes] * 5
        assert offload.stats().micro_batches == 6
        assert offload.stats().offloaded_bytes == 0


@EACH_WAY
def test_a_step_that_saves_more_unseen_stays_within_the_budget(how: str, scratch: Path) -> None:
    model = Model()
    with _used(how, model, scratch, memory_budget=20 * LAYER_BYTES) as offload:
        for _ in range(3):
            _step(how, offload, model)
        made = records(offload)
        assert offload._saver.rest.fitted_bytes > 10 * LAYER_BYTES
        model.passes = 16
        grown = _step(how, offload, model)
        offload.stats()
        assert records(offload) > made
        assert offload.stats().offloaded_bytes > 10 * LAYER_BYTES
        assert 10 * LAYER_BYTES < offload.stats().peak_bytes <= 20 * LAYER_BYTES
        offload.close()
        assert_bit_equal(grown, _step("attach", None, model))


def test_after_a_step_that_was_too_large_those_that_fit_are_light_again(scratch: Path) -> None:
    model = Model()
    with _used("attach", model, scratch, memory_budget=20 * LAYER_BYTES) as offload:
        for passes in (4, 4, 16, 4, 4):
            model.passes = passes
            _step("attach", offload, model)
        made = records(offload)
        _steps(offload, model)
        assert records(offload) == made


def test_forwards_before_a_backward_are_counted_together_and_those_given_up_are_not(scratch: Path) -> None:
    model, x = Model(), torch.randn(ROWS, WIDTH)
    with _used("attach", model, scratch, memory_budget=20 * LAYER_BYTES) as offload:
        _steps(offload, model)
        made = records(offload)
        for _ in range(2):
            model(x)  # whose memory the next has again
        model(x).backward()
        assert (offload.stats().offloaded_bytes, records(offload)) == (0, made)
        model(x)
        (model(x) + model(x) + model(x)).backward()
        assert offload.stats().offloaded_bytes > 10 * LAYER_BYTES
        assert offload.stats().peak_bytes <= 20 * LAYER_BYTES


def test_what_is_saved_ahead_of_the_forward_keeps_itsrecords(scratch: Path) -> None:
    model, first = Model(), nn.Linear(WIDTH, WIDTH)

    def step() -> list[Tensor]:
        model.zero_grad()
        first.zero_grad()
        torch.manual_seed(0)
        model(first(torch.randn(ROWS, WIDTH)).sigmoid()).backward()
        return [p.grad.clone() for p in (*first.parameters(), *model.parameters()) if p.grad is not None]

    expected = step()
    with _used("", model, scratch) as offload, offload:
        made = []
        for _ in range(5):
            assert_bit_equal(step(), expected)
            made.append(records(offload))
        each = [after - before for before, after in pairwise(made)]
        assert each[1:] == [each[1]] * 3  # those ahead of the forward only
        assert 0 < each[1] < made[0]


def test_an_edit_in_place_is_found(scratch: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    with _used("attach", model, scratch) as offload:
        x = torch.randn(ROWS, WIDTH)
        for _ in range(3):
            model(x).sum().backward()
        assert offload._saver.rest.resting
        loss = model(x).exp()
        loss.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()


def test_own_code_gets_memory_of_its_own(scratch: Path) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = x * 2
            ctx.save_for_backward(x, out)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            x, out = ctx.saved_tensors
            x.mul_(0)  # its own, as a copy
            return out.mul_(gradient)

    def custom(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (Doubled.apply(y) + y.sin()).sum()  # type: ignore[no-untyped-call, no-any-return]

    model = Made(custom, linear=nn.Linear(WIDTH, WIDTH))
    with _used("attach", model, scratch) as offload:
        steps = [_step("attach", offload, model) for _ in range(4)]
        assert offload._saver.rest.resting
    for later in steps[1:]:
        assert_bit_equal(later, steps[0])


def test_a_second_backward_and_gradients_of_gradients(scratch: Path) -> None:
    model = Model()

    def step() -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        loss = model(x)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), list(model.parameters()), retain_graph=True)
        return [first.detach(), *second, *torch.autograd.grad(loss, list(model.parameters()))]

    expected = step()
    with _used("attach", model, scratch) as offload:
        for _ in range(4):
            assert_bit_equal(step(), expected)
        assert offload._saver.rest.resting


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside(reentrant: bool, scratch: Path) -> None:
    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_(True)
            for _ in range(self.passes):
                x = checkpoint(self.layers, x, use_reentrant=reentrant)
            return x.square().sum()

    model = Checkpointed()
    expected = _step("attach", None, model)
    with _used("attach", model, scratch) as offload:
        for _ in range(4):
            assert_bit_equal(_step("attach", offload, model), expected)
        assert offload._saver.rest.resting


def test_a_mode_sees_nothing_of_it(scratch: Path) -> None:
    model = Model()
    expected = _step("attach", None, model)
    with FlopCounterMode(display=False) as plain:
        _step("attach", None, model)
    with _used("attach", model, scratch) as offload:
        _steps(offload, model)
        made = records(offload)
        with FlopCounterMode(display=False) as counter:
            assert_bit_equal(_step("attach", offload, model), expected)
        assert counter.get_total_flops() == plain.get_total_flops()
        assert records(offload) == made


def test_what_a_backward_that_keeps_its_graph_saves_is_seen(scratch: Path) -> None:
    model = Model()
    with _used("attach", model, scratch, memory_budget=24 * LAYER_BYTES) as offload:
        _steps(offload, model)
        made = records(offload)
        parameters = list(model.parameters())
        with offload:
            again = torch.autograd.grad(model(torch.randn(ROWS, WIDTH)), parameters, create_graph=True)
        assert records(offload) > made
        torch.autograd.grad(sum(each.square().sum() for each in again), parameters)  # type: ignore[arg-type]
        assert offload.stats().peak_bytes <= 24 * LAYER_BYTES


def test_graphs_that_live_on_are_in_the_budget_of_the_next_step(scratch: Path) -> None:
    model = Model()
    with _used("attach", model, scratch, memory_budget=24 * LAYER_BYTES) as offload:
        _steps(offload, model)
        x = torch.randn(ROWS, WIDTH)
        first = model(x)
        first.backward(retain_graph=True)
        second = model(x)  # both together are more than the budget
        second.backward()
        first.backward()
        assert offload.stats().offloaded_bytes > 8 * LAYER_BYTES
        assert offload.stats().peak_bytes <= 24 * LAYER_BYTES


def test_a_step_that_is_traced_has_itsrecords(scratch: Path) -> None:
    model = Model()
    with _used("attach", model, scratch) as offload:
        _steps(offload, model, 5)
        made = records(offload)
        with offload.trace() as events:
            _step("attach", offload, model)
        assert records(offload) > made
        assert {event.kind for event in events} >= {"saved", "held"}


def test_other_shapes_are_seen_first(scratch: Path) -> None:
    model = Model()
    with _used("attach", model, scratch) as offload:
        for rows, new in ((64, True), (64, False), (32, False), (128, True), (128, False), (64, False)):
            made = records(offload)
            _step("attach", offload, model, rows)
            assert (records(offload) > made) == new


def test_no_graph_outlives_its_step(scratch: Path) -> None:
    model = Model()
    with _used("attach", model, scratch) as offload:
        _steps(offload, model)
        x = torch.randn(ROWS, WIDTH)
        y = model.layers[0](x).exp()  # an output that its own node saves
        gone = weakref.ref(y)
        gc.disable()
        try:
            loss = model(y)
            del y
            loss.backward()
            del loss
            assert gone() is None
        finally:
            gc.enable()


class Masked(nn.Module):
    """Saves a large buffer after as many layers as its attribute says."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.passes = 4
        self.register_buffer("mask", torch.ones(30 * ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.passes):
            x = self.layer(x).tanh()
        return (x.repeat(30, 1) * self.mask).sum()


def test_a_buffer_gives_no_room_to_activations(scratch: Path) -> None:
    model = Masked()
    budget = 20 * LAYER_BYTES
    with _used("around the step", model, scratch, memory_budget=budget) as offload:
        for _ in range(3):
            _step("around the step", offload, model)
        assert offload._saver.rest.fitted_bytes < 10 * LAYER_BYTES
        model.passes = 30
        gradients = _step("around the step", offload, model)
        model.zero_grad()
        torch.manual_seed(ROWS)
        model(torch.randn(ROWS, WIDTH)).backward()
        assert_bit_equal(gradients, [each.grad for each in model.parameters() if each.grad is not None])
        assert 5 * LAYER_BYTES < offload.stats().peak_bytes <= budget
