"""Rest: tier auto leaves its hooks off where a run has fitted, and has them on again before it may not."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.exactness import assert_bit_equal
from support.planned import WAYS, step, used
from tba import ConfigError, Offloader, offload_context
from tba._auto.rest import Rest, covers
from tba._torch import private


class Model(nn.Module):
    """Notes whether hooks are on in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.hooks: list[bool] = []

    def forward(self, x: Tensor, extra: Any = None) -> Tensor:
        self.hooks.append(private.top_hooks(True) is not None)
        return self.layers(x).square().sum()  # type: ignore[no-any-return]


def _step(how: str, offload: Offloader | None, model: Model, rows: int = 64, **arguments: Any) -> list[Tensor]:
    return step(how, offload, model, rows, 32, **arguments)


@pytest.mark.parametrize("how", WAYS)
def test_a_run_that_fits_has_no_hooks_until_shapes_grow(how: str, scratch: Path) -> None:
    model = Model()
    expected = {rows: _step("attach", None, model, rows) for rows in (64, 32, 128)}  # not attached yet
    model.hooks.clear()
    with used(how, model, scratch) as offload:
        for rows in (64, 64, 64, 64, 32, 64):
            assert_bit_equal(_step(how, offload, model, rows), expected[rows])
        assert model.hooks == [True] + [False] * 5
        assert_bit_equal(_step(how, offload, model, 128), expected[128])  # larger
        assert_bit_equal(_step(how, offload, model, 128), expected[128])
        _step(how, offload, model, 128)
        assert model.hooks[6:] == [True, False, False]
        assert offload.stats().offloaded_bytes == 0
        assert offload.stats().live_records == 0


def test_a_context_around_the_loop_has_its_hooks_off_too(scratch: Path) -> None:
    model = Model()
    expected = [_step("attach", None, model, rows) for rows in (64, 64, 64, 128, 128)]
    model.hooks.clear()
    with used("", model, scratch) as offload, offload:
        for wanted, rows in zip(expected, (64, 64, 64, 128, 128), strict=True):
            assert_bit_equal(_step("attach", None, model, rows), wanted)
        assert model.hooks == [True, False, False, True, False]
    assert private.top_hooks(True) is None


def test_a_run_that_nearly_fills_memory_keeps_its_hooks(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    monkeypatch.setattr("tba._memory.room.Room._free_and_reserve_bytes", lambda *_: (1 << 16, 0))
    with used("", model, scratch) as offload:
        for _ in range(3):
            _step("around the step", offload, model)
        assert offload.stats().offloaded_bytes == 0
    assert model.hooks == [True] * 3


@pytest.mark.parametrize("change", ["training", "requires_grad", "an argument that tells no size", "another argument"])
def test_what_else_brings_the_hooks_back(change: str, scratch: Path) -> None:
    model = Model()
    model.layers[0].requires_grad_(False)
    arguments: dict[str, Any] = {}
    with used("", model, scratch) as offload:
        for _ in range(2):
            _step("around the step", offload, model)
        assert model.hooks == [True, False]
        if change == "training":
            model.eval()
        elif change == "requires_grad":
            model.layers[0].requires_grad_(True)
            offload._saver.rest._forwards_left = 0  # it is looked at now and then
        else:
            arguments["extra"] = object() if change.endswith("size") else torch.ones(3)
        _step("around the step", offload, model, **arguments)
    assert model.hooks == [True, False, True]


def test_memory_that_others_take_brings_the_hooks_back(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    free = [64 << 30]
    monkeypatch.setattr("tba._memory.free_memory.free_bytes", lambda: free[0])
    with used("", model, scratch) as offload:
        for _ in range(3):
            _step("around the step", offload, model)
        assert model.hooks == [True, False, False]
        free[0] = 1 << 20
        while not model.hooks[-1]:
            _step("around the step", offload, model)
        assert len(model.hooks) < 70


@pytest.mark.parametrize(
    "settings", [{"memory_budget": "1GiB"}, {"memory_budget": 8192}, {"compress": "exact"}, {"compress": "safe8"}]
)
def test_where_a_setting_limits_bytes_or_a_codec_sees_every_step_the_hooks_stay(settings: Any, scratch: Path) -> None:
    model = Model()
    with used("", model, scratch, **settings) as offload:
        for _ in range(3):
            _step("around the step", offload, model)
        assert (offload.stats().offloaded_bytes > 0) == (settings.get("memory_budget") == 8192)  # it does not fit
    assert model.hooks == [True] * 3


def test_without_a_model_the_hooks_stay_on(scratch: Path) -> None:
    model = Model()
    with offload_context(None, "auto", storage_paths=scratch) as offload:
        for _ in range(3):
            _step("around the step", offload, model)
    assert model.hooks == [True] * 3
    offload.close()


def test_a_closed_engine_leaves_nothing_at_the_model(scratch: Path) -> None:
    model = Model()
    with used("", model, scratch) as offload:
        assert not model._forward_pre_hooks
        with offload:
            assert len(model._forward_pre_hooks) == 1
        assert offload_context(model, "auto", storage_paths=scratch, min_tensor_bytes=0) is offload
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("settings", "line", "verdict", "plan"),
    [
        (
            {},
            r"first step saved .* KiB, memory has room for .* GiB of it: nothing moves, the hooks are off",
            r"saved tensors [\d.]+ KiB, all in memory: they fit; hooks off since step 2",
            r"no plan: [\d.]+ KiB fits [\d.]+ GiB of free memory; hooks are off",
        ),
        (
            {"memory_budget": "8GiB"},
            r"first step saved .* KiB, memory has room for 8\.0 GiB of it: nothing moves, the hooks only count",
            r"saved tensors [\d.]+ KiB, all in memory: they fit; hooks only count since step 2",
            r"no plan: [\d.]+ KiB fits 8 GiB; hooks only count",
        ),
        (
            {"memory_budget": 8192},
            r"first step saved .* KiB, memory has room for 8\.0 KiB of it: .* went out of memory",
            r"saved tensors [\d.]+ -> [\d.]+ KiB \(-\d+%\), .*waited \d+%",
            r"a step saves +[\d.]+ KiB",
        ),
    ],
)
def test_the_first_step_says_what_was_decided(
    settings: Any, line: str, verdict: str, plan: str, scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    caplog.set_level(logging.INFO, "tba")
    with used("", model, scratch, **settings) as offload:
        for _ in range(3):
            _step("around the step", offload, model)
        assert re.fullmatch(verdict, offload.stats().verdict)
        assert re.match(plan, str(offload.plan))
        if not offload.plan:
            with pytest.raises(ConfigError, match=f"there is no plan to draw: {plan}"):
                offload.plan.picture(scratch / "plan.png")
            assert offload.plan._repr_html_() == f"<p>{offload.plan}</p>"
    (said,) = caplog.records
    assert re.search(line, said.getMessage())
    assert said.levelno == (logging.WARNING if "went out" in line else logging.INFO)


# -- by itself -----------------------------------------------------------------------------------------------------


def _arguments(*shapes: tuple[int, ...], training: bool = True, dtype: Any = torch.float32, grad: bool = False) -> Any:
    return (training, False, False), tuple((dtype, grad, *shape) for shape in shapes)


@pytest.mark.parametrize(
    ("new", "fits"),
    [
        (_arguments((8, 512)), True),
        (_arguments((8, 100)), True),
        (_arguments((1, 4096)), False),  # as many elements, in a longer sequence
        (_arguments((9, 512)), False),
        (_arguments((8, 512, 1)), False),
        (_arguments((8, 512), (1,)), False),
        (_arguments((8, 512), training=False), False),
        (_arguments((8, 512), dtype=torch.bfloat16), False),
        (_arguments((8, 512), grad=True), False),
        (((True, False, False), ((3,),)), False),
    ],
)
def test_shapes_that_fit_are_those_seen_and_smaller_ones(new: Any, fits: bool) -> None:
    assert covers(_arguments((8, 512)), new) == fits


def test_the_more_room_the_fewer_looks() -> None:
    model = nn.Linear(2, 2)
    for kept_bytes, most in ((2000, 100), (100, 10), (10, 2), (0, 0)):
        rest, looks = Rest(True, lambda: model), 0
        key = rest.key((torch.ones(3),), {})
        assert not rest.begins(key)
        rest.end_step(kept_bytes=kept_bytes, moved_bytes=0, failures=0, room_bytes=6000)
        for _ in range(100):
            looks += rest.looks(key)
            assert rest.begins(key, room_bytes=6000)
        assert looks == most


def test_a_step_runs_with_hooks_every_so_often() -> None:
    rest, model = Rest(True, lambda: model), nn.Linear(2, 2)
    rest.begins(rest.key((torch.ones(3),), {}))
    rest.end_step(kept_bytes=0, moved_bytes=0, failures=0, room_bytes=0)
    rested = 0
    while rest.begins(rest.key((torch.ones(3),), {})):
        rested += 1
    assert rested == 255


@pytest.mark.parametrize(
    "argument",
    [
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        [0] * 2000,
        object(),
        {"a": [object()]},
    ],
)
def test_an_argument_that_tells_no_size_is_never_rested_with(argument: Any) -> None:
    rest, model = Rest(True, lambda: model), nn.Linear(2, 2)
    assert not rest.begins(rest.key((argument,), {}))
    rest.end_step(kept_bytes=0, moved_bytes=0, failures=0, room_bytes=0)
    assert not rest.resting


def test_a_step_that_fits_because_of_its_plan_is_no_step_that_fits() -> None:
    rest, model = Rest(True, lambda: model), nn.Linear(2, 2)
    rest.begins(rest.key((torch.ones(3),), {}))
    rest.end_step(kept_bytes=1, moved_bytes=0, failures=0, room_bytes=9, planned=True)
    assert not rest.resting


def test_a_forward_that_failed_says_nothing() -> None:
    rest, model = Rest(True, lambda: model), nn.Linear(2, 2)
    rest.begins(rest.key((torch.ones(3),), {}))
    rest.leave(failed=True)
    rest.end_step(kept_bytes=0, moved_bytes=0, failures=0, room_bytes=0)
    assert not rest.resting


# -- among hooks of others -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_larger_batch_inside_of_a_checkpoint_is_exact(reentrant: bool, scratch: Path) -> None:
    model = Model()

    def step(rows: int) -> list[Tensor]:
        model.zero_grad()
        x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows), requires_grad=True)
        y = checkpoint(model, x, use_reentrant=reentrant)
        (y * y.sin()).sum().backward()
        return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]  # type: ignore[list-item]

    expected = [step(rows) for rows in (64, 64, 64, 128, 128)]
    with used("", model, scratch) as offload:
        for wanted, rows in zip(expected, (64, 64, 64, 128, 128), strict=True):
            with offload:
                assert_bit_equal(step(rows), wanted)
            assert private.top_hooks(True) is None


def test_a_larger_batch_inside_of_somebody_elses_hooks_is_theirs(scratch: Path) -> None:
    model, packed = Model(), list[int]()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (packed.append(1), x.detach())[1], lambda x: x)
    with used("", model, scratch) as offload:
        for rows in (64, 64, 128):
            with offload:
                if rows == 64:
                    _step("attach", None, model, rows)
                    continue
                with hooks:
                    _step("attach", None, model, rows)
                inside = len(packed)
                torch.randn(8, requires_grad=True).sin()
            assert private.top_hooks(True) is None
    assert len(packed) == inside > 0


def test_nothing_is_pushed_where_hooks_are_lifted(scratch: Path) -> None:
    model = Model()
    with used("", model, scratch) as offload, offload:
        for _ in range(2):
            _step("attach", None, model, 64)
        with offload.suspend():
            _step("attach", None, model, 128)
            torch.func.grad(lambda x: x.sin().sum())(torch.ones(3))
    assert model.hooks == [True, False, False]
