"""Rest: tier auto leaves its hooks off where a run has fitted, and has them on again before it may not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_bit_equal
from torch import Tensor, nn

from tba import Offloader, _torch, attach, offload_context
from tba._policy import FITS
from tba._rest import Rest, covers
from tba._stats import Counters


class Model(nn.Module):
    """Notes whether hooks are on in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.hooks: list[bool] = []

    def forward(self, x: Tensor, extra: Any = None) -> Tensor:
        self.hooks.append(_torch.top_hooks(True) is not None)
        return self.layers(x).square().sum()  # type: ignore[no-any-return]


@contextmanager
def _used(how: str, model: nn.Module, scratch: Path, **settings: Any) -> Iterator[Offloader]:
    settings = {"storage_paths": scratch, "min_tensor_bytes": 0} | settings
    offload = (attach if how == "attach" else offload_context)(model, "auto", **settings)
    yield offload
    offload.close()


def _step(how: str, offload: Any, model: Model, rows: int = 64, **arguments: Any) -> list[Tensor]:
    model.zero_grad()
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
    if how == "attach":
        model(x, **arguments).backward()
    elif how == "around the step":
        with offload:
            model(x, **arguments).backward()
    else:
        with offload:
            loss = model(x, **arguments)
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("how", ["attach", "around the step", "around the forward"])
def test_a_run_that_fits_has_no_hooks_until_shapes_grow(how: str, scratch: Path) -> None:
    model = Model()
    expected = {rows: _step("attach", None, model, rows) for rows in (64, 32, 128)}  # not attached yet
    model.hooks.clear()
    with _used(how, model, scratch, memory_budget="1GiB") as offload:
        for rows in (64, 64, 64, 64, 32, 64):
            assert_bit_equal(_step(how, offload, model, rows), expected[rows])
        first = 1 if how == "around the step" else 2  # else a step ends where the next begins
        assert model.hooks == [True] * first + [False] * (6 - first)
        assert_bit_equal(_step(how, offload, model, 128), expected[128])  # larger
        assert_bit_equal(_step(how, offload, model, 128), expected[128])
        _step(how, offload, model, 128)
        assert model.hooks[6:] == [True] * first + [False] * (3 - first)
        assert offload.stats().offloaded_bytes == 0
        assert offload.stats().live_records == 0


def test_a_run_that_nearly_fills_its_budget_keeps_its_hooks(scratch: Path) -> None:
    model = Model()
    with _used("", model, scratch, memory_budget="1GiB") as offload:
        _step("around the step", offload, model)
        held_bytes = offload.stats().kept_by_reason["fits in memory"]
    model.hooks.clear()
    with _used("", model, scratch, memory_budget=int(held_bytes * 1.1)) as offload:
        for _ in range(3):
            _step("around the step", offload, model)
    assert model.hooks == [True] * 3


def test_a_run_that_does_not_fit_keeps_its_hooks_and_moves(scratch: Path) -> None:
    model = Model()
    with _used("", model, scratch, memory_budget=4096) as offload:
        for _ in range(3):
            _step("around the step", offload, model)
        assert offload.stats().offloaded_bytes > 0
    assert model.hooks == [True] * 3


@pytest.mark.parametrize("change", ["training", "requires_grad", "an argument that tells no size", "another argument"])
def test_what_else_brings_the_hooks_back(change: str, scratch: Path) -> None:
    model = Model()
    model.layers[0].requires_grad_(False)
    arguments: dict[str, Any] = {}
    with _used("", model, scratch, memory_budget="1GiB") as offload:
        for _ in range(2):
            _step("around the step", offload, model)
        assert model.hooks == [True, False]
        if change == "training":
            model.eval()
        elif change == "requires_grad":
            model.layers[0].requires_grad_(True)
            offload._saver.rest._entries_left = 0  # it is looked at now and then
        else:
            arguments["extra"] = object() if change.endswith("size") else torch.ones(3)
        _step("around the step", offload, model, **arguments)
    assert model.hooks == [True, False, True]


def test_memory_that_others_take_brings_the_hooks_back(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    free = [64 << 30]
    monkeypatch.setattr("tba._pressure._memory.free_bytes", lambda: free[0])
    with _used("", model, scratch) as offload:
        for _ in range(3):
            _step("around the step", offload, model)
        assert model.hooks == [True, False, False]
        free[0] = 1 << 20
        for _ in range(2000):
            _step("around the step", offload, model)
            if model.hooks[-1]:
                break
        assert model.hooks[-1]
        assert len(model.hooks) < 1010


@pytest.mark.parametrize("settings", [{"compress": "exact"}, {"compress": "safe8"}])
def test_a_codec_sees_every_step(settings: Any, scratch: Path) -> None:
    model = Model()
    with _used("", model, scratch, memory_budget="1GiB", **settings) as offload:
        for _ in range(3):
            _step("around the step", offload, model)
    assert model.hooks == [True] * 3


def test_without_a_model_the_hooks_stay_on(scratch: Path) -> None:
    model = Model()
    with offload_context(None, "auto", storage_paths=scratch, memory_budget="1GiB") as offload:
        for _ in range(3):
            _step("around the step", offload, model)
    assert model.hooks == [True] * 3
    offload.close()


def test_a_closed_engine_leaves_nothing_at_the_model(scratch: Path) -> None:
    model = Model()
    with _used("", model, scratch) as offload:
        assert len(model._forward_pre_hooks) == 1
        assert offload_context(model, "auto", storage_paths=scratch, min_tensor_bytes=0) is offload
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"memory_budget": "1GiB"},
            r"first step saved .* KiB, memory has room for 1\.0 GiB of it: nothing moves, the hooks are off",
        ),
        (
            {"memory_budget": 4096},
            r"first step saved .* KiB, memory has room for 4\.0 KiB of it: .* went out of memory",
        ),
    ],
)
def test_the_first_step_says_what_was_decided(
    settings: Any, line: str, scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    with _used("", model, scratch, **settings) as offload:
        for _ in range(3):
            _step("around the step", offload, model)
    assert len(caplog.messages) == 1
    assert re.search(line, caplog.messages[0]), caplog.messages


# -- by itself -----------------------------------------------------------------------------------------------------


def _arguments(*shapes: tuple[int, ...], training: bool = True) -> Any:
    return training, tuple((torch.float32, *shape) for shape in shapes)


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
        ((True, ((torch.bfloat16, 8, 512),)), False),
        ((True, ((3,),)), False),
    ],
)
def test_shapes_that_fit_are_those_seen_and_smaller_ones(new: Any, fits: bool) -> None:
    assert covers(_arguments((8, 512)), new) == fits


def test_the_more_room_the_fewer_looks() -> None:
    looks: list[int] = []
    model = nn.Linear(2, 2)

    def room() -> int:
        looks.append(1)
        return 1000

    for kept_bytes, most in ((400, 100), (100, 20), (10, 2), (0, 0)):
        rest = Rest(True, lambda: model, room, fixed=False)
        rest.begins((torch.ones(3),), {})
        counters = Counters()
        counters.kept_by_reason[FITS] = kept_bytes
        rest.end_step(counters, 1000)
        looks.clear()
        for _ in range(100):
            assert rest.goes_on()
        assert len(looks) == most
