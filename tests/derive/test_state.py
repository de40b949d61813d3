"""Recipes: the state they run in, what their signatures tell apart, and layer norm, whose eps nobody saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from support.derive import Harness, check, derive, mkldnn, operands, settle, threads
from support.exactness import assert_bit_equal
from tba._derive.search import recipe

Function = Callable[[Tensor, Tensor], Tensor]


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
    assert settle(made, torch.zeros(7, 13)) is None


def test_under_autocast_the_casts_are_nodes_and_compute_makes_none() -> None:
    harness = Harness()
    with harness.hooks(), torch.autocast("cpu", torch.bfloat16):
        x = operands()[0]
        lowered = functional.linear(x, torch.randn(5, 13, requires_grad=True))
        product = lowered * lowered.float()
        made = check(harness, product)
        assert product.dtype == torch.float32
    assert_bit_equal(made.compute(), product.detach())


def signature(function: Function, **how: Any) -> Any:
    harness = Harness()
    with harness.hooks():
        made = derive(harness, function(*operands(**how)))
    assert made is not None
    return made.signature


def test_signatures_tell_recipes_apart_by_operators_dtype_and_shape() -> None:
    product: Function = lambda x, y: x * y  # noqa: E731
    same = signature(product), signature(product, seed=1)
    assert same[0] == same[1]
    assert hash(same[0]) == hash(same[1])
    others = [
        same[0],
        signature(lambda x, y: x / y),
        signature(product, dtype=torch.bfloat16),
        signature(product, layout="broadcast"),
        signature(lambda x, y: (x * y).t().clone()),
        signature(lambda x, y: (x * y) * 2.0),
    ]
    assert len(set(others)) == len(others)


# -- layer norm ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12, 1e-3, 0.0])
@pytest.mark.parametrize("affine", ["both", "weight", "none", "frozen"])
def test_layer_norm_finds_its_eps(eps: float, affine: str) -> None:
    harness = Harness()
    norm = nn.LayerNorm(13, eps=eps, elementwise_affine=affine != "none", bias=affine == "both")
    norm.requires_grad_(affine != "frozen")
    with harness.hooks():
        x = operands(seed=2)[0] * 0.01
        made = check(harness, norm(x))
    assert made.depth == 1


def test_layer_norm_over_two_dimensions_and_in_mixed_types() -> None:
    harness = Harness()
    with harness.hooks():
        x = operands()[0]
        check(harness, functional.layer_norm(x, (7, 13)))
        weight = torch.rand(13, requires_grad=True)
        check(harness, functional.layer_norm(x.to(torch.bfloat16), (13,), weight, weight))


@pytest.mark.parametrize("eps", [1.5, 0.037, -1e-3])
def test_layer_norm_with_an_eps_that_nobody_uses_is_not_derived(eps: float) -> None:
    harness = Harness()
    with harness.hooks():
        x = operands()[0]
        for _ in range(2):
            check(harness, functional.layer_norm(x, (13,)))  # of the same shape, with the usual one
            odd = functional.layer_norm(x, (13,), eps=eps)
            made = derive(harness, odd)
            assert made is not None
            with pytest.raises(RuntimeError, match="no common eps"):
                made.settled(lambda packed, operand: (packed, operand))
            assert settle(made, odd) is None


def test_statistics_too_narrow_to_tell_the_eps_serve_where_the_tensor_tells() -> None:
    harness = Harness()
    with harness.hooks():
        weight = torch.rand(13, dtype=torch.bfloat16, requires_grad=True)
        check(harness, functional.layer_norm(operands()[0].to(torch.bfloat16), (13,), weight, weight))


def test_the_eps_of_the_last_layer_norm_is_only_where_the_search_begins() -> None:
    harness = Harness()
    with harness.hooks():
        x = operands()[0] * 0.01
        for eps in (1e-3, 1e-12, 1e-3):
            check(harness, functional.layer_norm(x, (13,), eps=eps))


def test_an_eps_that_large_values_swallow_is_found_where_small_ones_show_it() -> None:
    harness = Harness()
    with harness.hooks():
        x = operands()[0]
        for scale in (1e3, 1.0, 1e-3, 0.0):
            check(harness, functional.layer_norm(x * scale, (13,), eps=1e-4))


def test_a_settled_layer_norm_asks_for_its_operands_alone() -> None:
    harness = Harness()
    with harness.hooks():
        norm = nn.LayerNorm(13)
        made = check(harness, norm(operands()[0]))
    assert [list(harness.unpack(packed).shape) for packed in made.sources] == [[7, 13], [13], [13]]
