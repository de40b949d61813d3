"""torchao's tensors: quantised weights and activations, where torchao is installed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.engine import engine
from support.exactness import assert_bit_equal

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend
quantization: Any = pytest.importorskip("torchao.quantization")


def _gradients(offload: Any) -> list[Tensor]:
    torch.manual_seed(0)
    frozen = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).requires_grad_(False)
    quantization.quantize_(frozen, quantization.Int8WeightOnlyConfig())
    adapter = nn.Linear(64, 64)
    x = torch.randn(32, 64)
    with offload or nullcontext():
        loss = frozen(adapter(x)).square().mean()
    if offload:
        offload.flush()
    loss.backward()
    return [p.grad for p in adapter.parameters() if p.grad is not None]


def test_training_before_a_quantised_model_is_exact(scratch: Path) -> None:
    expected = _gradients(None)
    with engine(scratch) as offload:
        found = _gradients(offload)
        stats = offload.stats()
    assert_bit_equal(found, expected)
    assert stats.read_bytes > 0
    assert not [reason for reason in stats.kept_by_reason if "Tensor" in reason]


class Keep(torch.autograd.Function):
    """x -> x, which saves a quantised tensor and multiplies the gradient by it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradients[0] * weight.dequantize(), None


def test_a_saved_quantised_tensor_moves_and_comes_back(scratch: Path) -> None:
    layer = nn.Linear(64, 128, bias=False)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    weight: Any = layer.weight.detach()
    x = torch.randn(128, 64, requires_grad=True)
    with engine(scratch) as offload:
        with offload:
            result: Any = Keep.apply(x, weight)
        offload.flush()
        found = result.grad_fn.saved_tensors[0]
        assert type(found) is type(weight)
        names, _ = weight.__tensor_flatten__()
        assert_bit_equal([getattr(found, name) for name in names], [getattr(weight, name) for name in names])
        result.sum().backward()
        assert_bit_equal(x.grad, weight.dequantize())
        stats = offload.stats()
    assert not stats.kept_by_reason
    assert stats.offloaded_bytes >= 64 * 128


def test_float8_training_is_exact(scratch: Path) -> None:
    float8: Any = pytest.importorskip("torchao.float8")

    def gradients(offload: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))
        found = []
        for _ in range(2):
            x = torch.randn(32, 64)
            with offload or nullcontext():
                loss = model(x).square().mean()
            if offload:
                offload.flush()
            loss.backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    expected = gradients(None)
    with engine(scratch) as offload:
        assert_bit_equal(gradients(offload), expected)
        stats = offload.stats()
    assert not stats.kept_by_reason
    assert stats.read_bytes > 0
