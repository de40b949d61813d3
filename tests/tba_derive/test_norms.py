"""Derived tensors: group norm and batch norm, whose bias nobody saves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from support.derive import derived_of, exact, threads
from tba._derive import operators
from tba._derive.operators import OPERATORS, WITHOUT_EPS

CHANNELS = 7  # of 301 columns of large operands, beside which a norm's weights are small enough to copy

# torch 2.13 saves the eps of a group norm, 2.15 does not: then it is found among those in use.
SAVES_EPS = hasattr(nn.GroupNorm(1, 1)(torch.ones(1, 1, 2, requires_grad=True)).grad_fn, "_saved_eps")

NORMS = {
    "group": lambda **how: nn.GroupNorm(1, CHANNELS, **how),
    "groups": lambda **how: nn.GroupNorm(CHANNELS, CHANNELS, eps=1e-6, **how),
    "groups, an eps that nobody uses": lambda **how: nn.GroupNorm(CHANNELS, CHANNELS, eps=1e-2, **how),
    "batch": lambda **how: nn.BatchNorm1d(CHANNELS, **how),
    "batch, no running statistics": lambda **how: nn.BatchNorm1d(CHANNELS, track_running_stats=False, **how),
}


def apply(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm of rows of seven channels."""
    found: Tensor = norm(x.view(len(x), CHANNELS, -1))
    return found


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_made_again(name: str, affine: bool, dtype: torch.dtype, count: int) -> None:
    norm = NORMS[name](affine=affine).to(dtype)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    with threads(count):
        made, nbytes = derived_of(lambda x, y: apply(norm, x), layout="large", dtype=dtype)
    assert made == (nbytes if SAVES_EPS or "nobody" not in name else 0)


@pytest.mark.parametrize("name", NORMS)
def test_what_has_a_bias_that_no_node_knows_is_stored(name: str) -> None:
    norm = NORMS[name](affine=True)
    norm.bias.requires_grad_(False)
    assert derived_of(lambda x, y: apply(norm, x), layout="large")[0] == 0


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_what_else_needs_no_gradient_is_no_matter(frozen: str) -> None:
    norm = nn.GroupNorm(1, CHANNELS)
    norm.weight.requires_grad_(frozen != "weight")
    made, nbytes = derived_of(lambda x, y: apply(norm, x.detach() if frozen == "input" else x), layout="large")
    assert made == (0 if frozen == "input" else nbytes)  # that has no node that tells of an edit


def test_a_batch_norm_in_evaluation_is_stored() -> None:
    norm = nn.BatchNorm1d(CHANNELS).eval()
    assert derived_of(lambda x, y: apply(norm, x), layout="large")[0] == 0


def test_running_statistics_are_updated_once_a_step() -> None:
    def train(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(CHANNELS, CHANNELS, 3), nn.BatchNorm1d(CHANNELS), nn.SiLU(), nn.Flatten())
        for number in range(4):
            with context:
                loss = model(torch.linspace(-1, 1 + number, 64 * CHANNELS * 99).view(64, CHANNELS, 99)).square().mean()
            loss.backward()
        return [*(parameter.grad for parameter in model.parameters() if parameter.grad is not None), *model.buffers()]

    offload = exact()
    try:
        found, wanted = train(offload), train(torch.enable_grad())
        assert offload.stats().derived_bytes > 0
    finally:
        offload.close()
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("edited", ["weight", "bias"])
def test_a_bias_may_be_edited_before_backward_and_a_weight_as_in_plain_pytorch(edited: str) -> None:
    """The bias has been copied; PyTorch raises for a weight that a node has saved."""

    def train(context: Any) -> Tensor | None:
        torch.manual_seed(0)
        norm = nn.GroupNorm(1, CHANNELS)
        x = torch.linspace(-1, 1, 257 * 301).view(257, CHANNELS, -1).requires_grad_()
        for _ in range(4):
            x.grad = None
            with context:
                loss = functional.silu(norm(x * 2)).square().sum()
            with torch.no_grad():
                getattr(norm, edited).add_(1)
            loss.backward()
        return x.grad

    offload = exact()
    try:
        if edited == "weight":
            for context in (offload, torch.enable_grad()):
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    train(context)
            return
        found, wanted = train(offload), train(torch.enable_grad())
        assert offload.stats().derived_bytes > 0
    finally:
        offload.close()
    assert found is not None
    assert wanted is not None
    assert torch.equal(found, wanted)


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group norms whose eps no node saves, as in torch 2.15, on any torch."""
    monkeypatch.setattr(operators, "_last_eps", {})
    for name, operator in WITHOUT_EPS.items():
        monkeypatch.setitem(OPERATORS, name, operator)  # type: ignore[arg-type]


@pytest.mark.usefixtures("unsaved")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_an_eps_is_found_and_told_by_one_group_of_one_sample(
    scale: float, affine: bool, dtype: torch.dtype, layout: torch.memory_format
) -> None:
    """The first group varies so much that it does not tell one eps from another. Bytes that are made again, by step."""

    def gradients(norm: nn.Module, context: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x = torch.randn(3, 8, 33, 5).to(memory_format=layout)
        x[0, :2] *= scale
        x = x.to(dtype).requires_grad_()
        with context:
            loss = functional.silu(norm(x * 2)).square().sum()
        return torch.autograd.grad(loss, [x, *norm.parameters()])

    plain, ours = (nn.GroupNorm(4, 8, affine=affine).to(dtype) for _ in range(2))
    derived = [0]
    offload = exact()
    try:
        for eps in (1e-5, 1e-5, 1e-5, 1e-6, 0.037):
            plain.eps = ours.eps = eps
            assert all(map(torch.equal, gradients(ours, offload), gradients(plain, torch.enable_grad())))
            derived.append(offload.stats().derived_bytes)
    finally:
        offload.close()
    each = [after - before for before, after in pairwise(derived)]
    both = 2 * 3 * 8 * 33 * 5 * dtype.itemsize  # the norm's result and the SiLU's, if that eps is found
    # Statistics in bfloat16 are too narrow to tell one eps from another, and nobody uses the last.
    assert each == [both, both, both, both if dtype is torch.float32 else both // 2, both // 2]
