"""Projected: the bytes of the rank, and errors with the numbers."""

from __future__ import annotations

import math

import pytest
import torch

from compact import CodecError, Projected, Projection, RankError, Spec, UnsupportedTensor, key

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
