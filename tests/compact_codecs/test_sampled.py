"""Sampled: the bytes of the rank, and errors with the numbers. test_contract has the rest."""

from __future__ import annotations

import pytest
import torch

from compact import CodecError, Projected, RankError, Sampled, Spec, UnsupportedTensor, cosine


@pytest.mark.parametrize(
    ("rank", "rows", "kept"), [(0.25, 64, 16), (0.25, 66, 16), (16, 66, 16), (0.1, 5, 1), (0.5, 3, 1)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_are_those_of_a_projection_and_an_index(rank: float, rows: int, kept: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed, width = Sampled(rank).encode(x, 1), Projected(rank).rank_of(64, "")
    assert packed.nbytes == Sampled(rank).packed_nbytes(Spec.of(x)) == kept * (64 * dtype.itemsize + 4)
    assert packed.nbytes - 4 * kept <= max(Projected(rank).packed_nbytes(Spec.of(x)), 64 * dtype.itemsize)
    assert kept == max(rows * width // 64, 1)
    decoded = Sampled(rank).decode(packed)
    assert int(decoded.any(1).sum()) == kept
    assert all(cosine(a, b) > 0.999 for a, b in zip(decoded, x, strict=True) if a.any())


def test_wrong_arguments() -> None:
    for rank in (0, 1.0, -1, True):
        with pytest.raises(CodecError, match=f"Sampled was given rank {rank}: give a whole number"):
            Sampled(rank)
    for tensor in (torch.zeros(4, dtype=torch.int64), torch.tensor(1.0)):
        with pytest.raises(UnsupportedTensor, match=r"wta-crs n\*0.25 was given .* one dimension; use Exact"):
            Sampled().encode(tensor)
    with pytest.raises(RankError, match="a sample of rows was given rank 65, but its width is 64"):
        Sampled(65).encode(torch.zeros(4, 64))
