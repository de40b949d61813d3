"""Projected: the bytes of the rank, the weight gradient without the input, and errors with the numbers."""

from __future__ import annotations

import math

import pytest
import torch

from compact import CodecError, Projected, Spec, UnsupportedTensor, WeightGradCodec, key, relative_error
from compact._projection import Projection, RankError

KINDS = ("gaussian", "rademacher", "orthonormal", "sparse")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("rank", "width", "wanted"), [(8, 64, 8), (0.25, 64, 16), (0.25, 66, 16), (0.1, 5, 1), (64, 64, 64)]
)
def test_bytes_are_those_of_the_rank(rank: int | float, width: int, wanted: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        packed = Projected(rank).encode(normal(2, 30, width).to(dtype), 1)
        assert packed.nbytes == 60 * wanted * dtype.itemsize


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_packed_and_decoded_is_the_projection_of_the_key(kind) -> None:  # type: ignore[no-untyped-def]
    x = normal(2, 30, 64)
    codec, projection = Projected(16, kind), Projection(kind, 64, 16, key(99, "projection"))
    packed = codec.encode(x, 99)
    z = projection.project(x)
    assert torch.equal(packed.buffers[0].view(torch.float32).view(2, 30, 16), z)
    assert torch.equal(codec.decode(packed), projection.back(z))


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_gradient_is_unbiased_and_as_far_off_as_theory_says(kind) -> None:  # type: ignore[no-untyped-def]
    x, grads = normal(3, 50, 64), normal(3, 50, 24, seed=1)
    exact = (grads.reshape(-1, 24).t() @ x.reshape(-1, 64)).double()
    codec = Projected(16, kind)
    assert isinstance(codec, WeightGradCodec)
    draws = torch.stack([codec.weight_grad(codec.encode(x, draw), grads) for draw in range(400)]).double()
    error = float((draws - exact).square().sum((1, 2)).mean() / exact.square().sum())
    assert error == pytest.approx({"gaussian": 64.9 / 16, "rademacher": 63 / 16}.get(kind, 3), rel=0.1)
    assert relative_error(draws.mean(0), exact) == pytest.approx(math.sqrt(error / 400), rel=0.2)


def test_a_verbatim_input_has_its_exact_weight_gradient() -> None:
    x, grads = normal(40, 64), normal(40, 8, seed=1)
    x[3, 5] = math.inf
    codec = Projected(16)
    packed = codec.encode(x, 1)
    assert packed.form == "verbatim"
    assert torch.equal(codec.weight_grad(packed, grads).isfinite().all(0), x.isfinite().all(0))


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_means_no_gradient(kind) -> None:  # type: ignore[no-untyped-def]
    codec = Projected(16, kind)
    packed = codec.encode(torch.zeros(0, 64))
    assert packed.nbytes == 0
    assert torch.equal(codec.weight_grad(packed, torch.zeros(0, 8)), torch.zeros(8, 64))


def test_a_rank_above_the_width_is_an_error_with_both() -> None:
    for call in (Projected(65).encode, lambda tensor: Projected(65).packed_nbytes(Spec.of(tensor))):
        with pytest.raises(RankError, match="rank 65, but its width is 64"):
            call(normal(10, 64))


@pytest.mark.parametrize("rank", [0, -1, 1.0, 0.0, 1.5, True, math.nan])
def test_a_rank_that_is_no_number_and_no_share(rank: int | float) -> None:
    with pytest.raises(CodecError, match=f"given rank {rank!r}"):
        Projected(rank)


def test_other_wrong_arguments() -> None:
    with pytest.raises(CodecError, match="kind 'haar' is not known: choose one of gaussian"):
        Projected(8, "haar")  # type: ignore[arg-type]
    for tensor in (torch.zeros(4, dtype=torch.int64), torch.tensor(1.0)):
        with pytest.raises(UnsupportedTensor, match="of at least one dimension; use Exact"):
            Projected(1).encode(tensor)
    codec = Projected(8)
    with pytest.raises(CodecError, match=r"needs an output gradient of shape \[5, 6, 'out'\], but got \[30, 2\]"):
        codec.weight_grad(codec.encode(normal(5, 6, 64)), normal(30, 2))
