"""compact.Projection: unbiased, with the variance it states, and the same matrix everywhere."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from compact import CodecError, Projection, RankError, key
from compact._projection.projection import KINDS, ProjectionKind
from compact._projection.walsh import fold

# Powers of two, blocks tied together (96 = 3 * 32, 50 = 25 * 2), odd, full, a rank that does not divide.
SIZES = ((64, 16), (96, 24), (50, 7), (33, 5), (32, 32), (48, 48), (1, 1))


def _projection(kind: ProjectionKind, width: int, rank: int, draw: int = 0) -> Projection:
    return Projection(kind, width, rank, key(7, kind, width, rank, draw))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "rank"), SIZES)
def test_project_and_back_are_the_matrix(kind: ProjectionKind, width: int, rank: int) -> None:
    projection = _projection(kind, width, rank)
    p = projection.matrix(torch.float64)
    assert p.shape == (width, rank)
    torch.manual_seed(0)
    x = torch.randn(3, 5, width, dtype=torch.float64)
    z = projection.project(x)
    assert z.is_contiguous()
    torch.testing.assert_close(z, x @ p)
    torch.testing.assert_close(projection.back(z), x @ p @ p.t())
    # Neither the layout nor what else is in the tensor matters.
    if kind in ("orthonormal", "sparse"):
        assert torch.equal(projection.project(x.flip(1)), z.flip(1))
        assert torch.equal(projection.project(x.movedim(-1, 0).contiguous().movedim(0, -1)), z)
        assert torch.equal(projection.project(x[:1, :1]), z[:1, :1])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "rank"), [*SIZES[:3], SIZES[5]])
def test_unbiased_with_the_stated_variance(kind: ProjectionKind, width: int, rank: int) -> None:
    draws = 400
    torch.manual_seed(1)
    g = torch.randn(8, width, dtype=torch.float64)  # eight gradients of one weight row, of which the error is averaged
    total, error = torch.zeros_like(g), 0.0
    for draw in range(draws):
        projection = _projection(kind, width, rank, draw)
        estimate = projection.back(projection.project(g))
        total += estimate
        error += ((estimate - g).square().sum() / g.square().sum()).item() / draws
    stated = _stated(kind, width, rank)
    if stated == 0:
        assert error < 1e-20
        return
    assert error == pytest.approx(stated, rel=0.1)
    # The mean's error has this standard deviation if the bias is zero; its square's is over some degrees of freedom.
    bias = ((total / draws - g).norm() / g.norm()).item()
    assert bias < 2 * math.sqrt(stated / draws)


def _stated(kind: ProjectionKind, width: int, rank: int) -> float:
    """E |P P^T g - g|^2 / |g|^2, from the table at the head of the module."""
    if kind == "sparse":
        rounds, rest = divmod(width, rank)  # pairs of rows that share a bucket; n / r - 1 where nothing is left over
        return rounds * (rank * (rounds - 1) + 2 * rest) / width
    return {"gaussian": (width + 0.9) / rank, "rademacher": (width - 1) / rank, "orthonormal": width / rank - 1}[kind]


@pytest.mark.parametrize(("width", "rank"), SIZES)
def test_orthonormal_columns_are_orthogonal(width: int, rank: int) -> None:
    p = _projection("orthonormal", width, rank).matrix(torch.float64)
    torch.testing.assert_close(p.t() @ p, torch.eye(rank, dtype=torch.float64) * width / rank)


@pytest.mark.parametrize(("width", "rank"), SIZES)
def test_sparse_has_one_sign_a_row_and_even_buckets(width: int, rank: int) -> None:
    p = _projection("sparse", width, rank).matrix(torch.float64)
    assert torch.equal(p.abs().sum(1), torch.ones(width, dtype=torch.float64))
    assert set(p.unique().tolist()) <= {-1.0, 0.0, 1.0}
    sizes = p.abs().sum(0)
    assert sizes.max() - sizes.min() <= 1


# sha256 of the fp32 matrices of two keys. They hold on every device; a changed hash is a changed meaning of keys.
_HASHES: dict[tuple[ProjectionKind, int, int], str] = {
    ("gaussian", 64, 16): "b0d5facc93a4e7876b0f3ad7451a857859cb32f5d0fa9446091cadbdd6a2d217",
    ("gaussian", 768, 8): "6071089a4ea7f804dc1d6bbbeb726f7618c719d1bc252a3c64c02fb5e8c0dd83",
    ("gaussian", 50, 7): "d1b0ec43256a4d6f731c1f12a6cfcf315b5f1bbed68f31b750deee8885c9b55c",
    ("rademacher", 64, 16): "748cd50e93d51871ff6778eceff90101386c1e4596d26e2de9a8153b2ca8281c",
    ("rademacher", 768, 8): "17c4e265332abcc55dc17a83510149ff238dcb813df35b7822731a3f97e4f5ba",
    ("rademacher", 50, 7): "ab1d05864cbaf071c151ecf3f5d5b96b721f6ade6f3746afefa434c7367e89c5",
    ("orthonormal", 64, 16): "c83b596b691126180e4e591e7fa557aef09ee5eb6333811a53d9956c2d009201",
    ("orthonormal", 768, 8): "ede34d2be488d68324cba32e0687e0352453ea2f5bce8a40f0ce59a9acb9332a",
    ("orthonormal", 50, 7): "164cecd8f13284b6d1eed7041d209205f7fbb777068b6265afb19da0fb19ec38",
    ("sparse", 64, 16): "255a181d739968344f9007013326e031d143154d670298849a46bed8d65cce28",
    ("sparse", 768, 8): "bb1f1f4d4a5b44ae8ead59ef91c546f5953f3ed5d05cc9fd40aa15c5ea625ad9",
    ("sparse", 50, 7): "70628ff17f26d48e7f1cec3cb37fc184b3941385d9db663088c1c4b94eda951e",
}


@pytest.mark.parametrize(("kind", "width", "rank"), sorted(_HASHES))
def test_stored_hashes(kind: ProjectionKind, width: int, rank: int) -> None:
    assert _digest(kind, width, rank) == _HASHES[kind, width, rank]


def test_every_kind_has_a_stored_hash() -> None:
    assert {kind for kind, _, _ in _HASHES} == set(KINDS)


def _digest(kind: ProjectionKind, width: int, rank: int) -> str:
    digest = hashlib.sha256()
    for number in (0, key(1, "layer", 2)):
        digest.update(Projection(kind, width, rank, number).matrix().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_unbiased(kind: ProjectionKind, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    projection = _projection(kind, 96, 24)
    x = torch.randn(200, 96).to(dtype)
    z = projection.project(x)
    assert z.dtype == dtype
    exact = x.double() @ projection.matrix(torch.float64)
    # Rounded where it is stored, and nowhere as a constant factor: the regression on the exact one has slope 1.
    epsilon = torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 1)  # sums of fp32 are rounded too
    assert (z.double() - exact).norm() / exact.norm() < epsilon
    assert abs((z.double() * exact).sum() / exact.square().sum() - 1) < max(epsilon / 20, 1e-6)
    back = projection.back(z)
    assert back.dtype == dtype
    assert (back.double() - z.double() @ projection.matrix(torch.float64).t()).norm() / back.double().norm() < epsilon


def test_autocast_and_grad_mode_do_not_reach_it() -> None:
    x = torch.randn(8, 64, requires_grad=True)
    for kind in KINDS:
        projection = _projection(kind, 64, 16)
        plain = projection.project(x)
        assert not plain.requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(projection.project(x), plain)
            assert torch.equal(projection.back(plain), projection.back(plain))
            assert projection.back(plain).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_many_columns_are_done_in_blocks_and_none_at_all(kind: ProjectionKind) -> None:
    projection = _projection(kind, 512, 128)
    x = torch.randn(1300, 512, dtype=torch.float64)  # more than two blocks
    torch.testing.assert_close(projection.project(x), x @ projection.matrix(torch.float64))
    x32 = x.to(torch.bfloat16)
    assert torch.equal(projection.project(x32)[1200:], projection.project(x32[1200:]))
    assert projection.project(x[:0]).shape == (0, 128)
    assert projection.back(projection.project(x[:0])).shape == (0, 512)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 25])
def test_fold_sums_and_leaves_its_input(count: int) -> None:
    x = torch.arange(count * 6.0).reshape(count, 2, 3)
    before = x.clone()
    total = fold(x)
    assert torch.equal(total, x.sum(0))
    total += 1
    assert torch.equal(x, before)


def test_says_what_is_wrong() -> None:
    with pytest.raises(RankError, match=r"rank 65, but its width is 64: choose a rank from 1 to 64"):
        Projection("gaussian", 64, 65, 0)
    with pytest.raises(RankError, match=r"rank 0"):
        Projection("sparse", 64, 0, 0)
    with pytest.raises(CodecError, match=r"'dct' is not known: choose one of gaussian"):
        Projection("dct", 64, 8, 0)  # type: ignore[arg-type]
    projection = Projection("gaussian", 64, 8, 0)
    with pytest.raises(ValueError, match=r"a torch.float32 tensor of shape \[2, 63\] from 64 to 8"):
        projection.project(torch.ones(2, 63))
    with pytest.raises(ValueError, match=r"from 8 to 64"):
        projection.back(torch.ones(2, 64))
    with pytest.raises(ValueError, match=r"torch.int64"):
        projection.project(torch.ones(2, 64, dtype=torch.int64))
