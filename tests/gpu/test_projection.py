"""On a CUDA device: the CPU's integers and projections bit for bit, and compact_linear against torch's layer there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from compact import Projection, compact_linear, key
from support.gpu import DEVICE, deterministic, gpu_only

pytestmark = gpu_only

Kind = Literal["gaussian", "rademacher", "orthonormal", "sparse"]


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize(("width", "rank"), [(1024, 256), (768, 8), (50, 7)])
def test_projections_are_those_of_the_cpu(kind: Kind, width: int, rank: int) -> None:
    projection = Projection(kind, width, rank, key(1, kind))
    assert torch.equal(projection.matrix(device=DEVICE).cpu(), projection.matrix())
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(300, width).to(dtype)
        z, on_device = projection.project(x), projection.project(x.to(DEVICE))
        if kind in ("orthonormal", "sparse"):  # sums in one order
            assert torch.equal(on_device.cpu(), z)
            assert torch.equal(projection.back(on_device).cpu(), projection.back(z))
        else:
            torch.testing.assert_close(on_device.cpu(), z, rtol=0.05, atol=0.1 if dtype == torch.bfloat16 else 0.02)


@pytest.mark.parametrize("shape", [(64, 256), (4, 16, 256), (2, 2, 16, 256), (256,)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_all_but_the_weight_gradient_is_bit_equal(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype, autocast: bool
) -> None:
    def run(layer: Callable[..., Tensor]) -> list[Tensor | None]:
        torch.manual_seed(0)
        x = torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True)
        weight = torch.randn(320, 256, device=DEVICE, dtype=dtype, requires_grad=True)
        added = torch.randn(320, device=DEVICE, dtype=dtype, requires_grad=True) if bias else None
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            out = layer(x, weight, added)
        out.square().sum().backward()
        return [out.detach(), x.grad, None if added is None else added.grad]

    with deterministic():
        exact, found = run(linear), run(lambda *args: compact_linear(*args, rank=64, key=3))
    for wanted, got in zip(exact, found, strict=True):
        assert (wanted is None and got is None) or torch.equal(wanted, got)  # type: ignore[arg-type]
