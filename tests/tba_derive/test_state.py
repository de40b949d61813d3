"""Derived tensors: the state they are made again in, and layer norm, whose eps nobody saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from support.derive import derived_of, mkldnn, operands, threads
from tba._derive.search import recipe


def test_compute_runs_in_the_recorded_state_and_leaves_the_present_one() -> None:
    seen: list[tuple[Any, ...]] = []

    def state() -> tuple[Any, ...]:
        return (
            torch.get_num_threads(),
            torch._C._get_mkldnn_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_grad_enabled(),
        )

    def unpack(tensor: Tensor) -> Tensor:
        seen.append(state())
        return tensor

    with threads(2), torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        with mkldnn(False):
            made = recipe(functional.silu(operands()[0]), unpack)
        assert made is not None
    with torch.autocast("cpu", torch.bfloat16):
        before = state()
        made.compute()
        assert state() == before
        torch.set_num_threads(before[0])
    assert before == (1, True, True, True)
    assert seen == [(2, False, False, False)]


def test_the_state_comes_back_when_compute_fails() -> None:
    def unpack(tensor: Tensor) -> Tensor:
        raise RuntimeError("no bytes")

    with threads(2), torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        made = recipe(functional.silu(operands()[0]), unpack)
    assert made is not None
    with pytest.raises(RuntimeError, match="no bytes"):
        made.compute()
    assert torch.get_num_threads() == 1


def test_under_autocast_the_casts_are_operators_too() -> None:
    def product(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            lowered = functional.linear(x, torch.ones(5, 13, requires_grad=True))
            return lowered * lowered.float()

    made, nbytes = derived_of(product)
    assert made == nbytes


def test_an_operator_run_in_place_on_a_narrower_tensor_is_not_run_on_a_wider() -> None:
    def narrow(x: Tensor, y: Tensor) -> Tensor:
        between = x.to(torch.bfloat16).clone()
        return -between.mul_(y)  # bfloat16, while bfloat16 times float32 is float32

    assert derived_of(narrow)[0] == 0


# -- layer norm ------------------------------------------------------------------------------------------------------

WIDTH = 301  # of large operands, beside which a norm's weights are small enough to copy


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12, 1e-3, 0.0])
@pytest.mark.parametrize("affine", ["both", "weight", "none", "frozen"])
def test_layer_norm_finds_its_eps(eps: float, affine: str) -> None:
    norm = nn.LayerNorm(WIDTH, eps=eps, elementwise_affine=affine != "none", bias=affine == "both")
    norm.requires_grad_(affine != "frozen")
    made, nbytes = derived_of(lambda x, y: norm(x * 0.01), layout="large")
    assert made == nbytes


def _wide(x: Tensor, y: Tensor) -> Tensor:
    return functional.layer_norm(x, (257, 301))


def _mixed(x: Tensor, y: Tensor) -> Tensor:
    weight = torch.ones(WIDTH, requires_grad=True)
    return functional.layer_norm(x.to(torch.bfloat16), (WIDTH,), weight, weight)


def _narrow(x: Tensor, y: Tensor) -> Tensor:
    """Its statistics are too narrow to tell the eps: the tensor itself does."""
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, requires_grad=True)
    return functional.layer_norm(x.to(torch.bfloat16), (WIDTH,), weight, weight)


@pytest.mark.parametrize("norm", [_wide, _mixed, _narrow])
def test_layer_norm_over_more_dimensions_and_in_other_types(norm: Any) -> None:
    made, nbytes = derived_of(norm, layout="large")
    assert made == nbytes


@pytest.mark.parametrize("eps", [1.5, 0.037, -1e-3])
def test_layer_norm_with_an_eps_that_nobody_uses_is_stored(eps: float) -> None:
    assert derived_of(lambda x, y: functional.layer_norm(x, (WIDTH,), eps=eps), layout="large")[0] == 0


@pytest.mark.parametrize("scale", [1e3, 1.0, 1e-3, 0.0])
def test_layer_norm_is_made_again_where_values_swallow_the_eps(scale: float) -> None:
    made, nbytes = derived_of(lambda x, y: functional.layer_norm(x * scale, (WIDTH,), eps=1e-4), layout="large")
    assert made >= nbytes
