"""Memory that a program's own code shares with the engine: what it edits or hands on harms nobody else."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.engine import engine
from support.exactness import assert_bit_equal

N = 64

LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "part": lambda x: x[10:20],
    "conjugated": lambda x: torch.view_as_complex(x.view(-1, 2)).conj(),
    "other dtype": lambda x: x.view(torch.int32),
}


def _edit(tensor: Tensor) -> None:
    tensor.detach().view(-1)[:3] *= 2


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("compress", [None, "exact"])
def test_what_a_hook_edits_of_its_nodes_tensors_is_read_again(
    compress: str | None, look: Callable[[Tensor], Tensor], scratch: Path
) -> None:
    """In a hook PyTorch says that the operator's own node runs, so nothing tells it from the operator."""
    x = torch.arange(1.0, 4097.0)
    seen = look(x).clone()
    kind = seen.dtype if seen.is_floating_point() or seen.is_complex() else torch.float32
    weight = torch.randn(seen.shape, dtype=kind).requires_grad_()
    with engine(scratch, compress=compress) as offload:
        with offload:
            y = look(x) * weight
        del x
        offload.flush()
        node: Any = y.grad_fn
        y.register_hook(lambda gradient: _edit(node._saved_self))
        y.backward(torch.ones_like(y))
        assert offload.stats().read_bytes > 0
        assert weight.grad is not None
        assert_bit_equal(weight.grad.resolve_conj(), seen.conj().resolve_conj().to(kind))


@pytest.mark.parametrize("tier", ["nvme", "keep"])
@pytest.mark.parametrize("made", ["packed", "derived"])
def test_what_a_hook_edits_of_a_tensor_made_again_is_made_again(made: str, tier: str, scratch: Path) -> None:
    source = torch.randn(N, N).requires_grad_() * 1  # no leaf, which may be edited without a trace
    one, other = (torch.randn(N, N).requires_grad_() for _ in range(2))
    with engine(scratch, tier=tier, compress="exact") as offload:
        with offload:
            x = nn.functional.gelu(source) if made == "derived" else (source > 0).float()
            first, second = x * one, x * other
        expected = x.detach().clone()
        del x
        if tier == "nvme":
            offload.flush()
        node: Any = second.grad_fn
        second.register_hook(lambda gradient: _edit(node._saved_self))
        (first.sum() + second.sum()).backward()
        stats = offload.stats()
        assert stats.derived_bytes > 0 if made == "derived" else stats.kept_bytes + stats.read_bytes > 0
    assert_bit_equal([one.grad, other.grad], [expected, expected])


def test_what_recomputation_is_given_and_edits_is_read_again(scratch: Path) -> None:
    given: list[Tensor] = []
    c = torch.randn(N)
    expected = c.clone()
    weight = torch.randn(N).requires_grad_()

    def function(c: Tensor) -> Tensor:
        given.append(c)
        return c * weight

    with engine(scratch) as offload:
        with offload:
            loss: Any = checkpoint(function, c, use_reentrant=False)
        del c
        given.clear()
        offload.flush()
        for _ in range(2):
            weight.grad = None
            loss.backward(torch.ones(N), retain_graph=True)
            assert_bit_equal(weight.grad, expected)
            _edit(given[-1])


class _ReturnsWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return weight, None


@pytest.mark.filterwarnings("ignore:tier='nvme' moved nothing")
@pytest.mark.parametrize("tier", ["nvme", "keep"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_saved_weight_that_is_returned_as_gradient_stays_the_weights(
    transposed: bool, tier: str, scratch: Path
) -> None:
    """Plain PyTorch copies it when it accumulates; a tensor from an unpack hook would be taken as it is."""
    weight = nn.Parameter(torch.randn(8, 8))
    before = weight.detach().clone()
    x: Any = torch.randn(8, 8).requires_grad_()
    with engine(scratch, tier=tier) as offload:
        with offload:
            y: Any = _ReturnsWeight.apply(x, weight.t() if transposed else weight)
        for _ in range(2):
            x.grad = None
            y.backward(torch.ones(8, 8), retain_graph=True)
            assert_bit_equal(x.grad.contiguous(), (before.t() if transposed else before).contiguous())
            x.grad.zero_()
            assert_bit_equal(weight.detach(), before)
        del y
        gc.collect()
        assert offload.stats().live_records == 0
