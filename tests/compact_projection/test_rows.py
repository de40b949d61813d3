"""Rows: which are kept, with which probability, and the product whose mean is the exact one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compact import bias
from compact._projection.rows import keep_rows, row_norms, rows_product

ROWS, WIDTH, OUT = 96, 48, 40


def _matrices(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """x [ROWS, WIDTH] with rows of very different norms, and d [ROWS, OUT]."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(ROWS, WIDTH, generator=generator) * torch.rand(ROWS, 1, generator=generator) ** 2
    return x.to(dtype), torch.randn(ROWS, OUT, generator=generator).to(dtype)


def _winners(norms: Tensor, count: int) -> int:
    """How many rows the paper always keeps: those that make (1 - P) / (count - number) smallest."""
    shares = (norms / norms.sum()).sort(descending=True).values
    return min(range(count), key=lambda number: (1 - float(shares[:number].sum())) / (count - number))


@pytest.mark.parametrize("count", [1, 12, 24, 48, 60])
def test_the_mean_is_exact_and_the_variance_at_most_the_paper_s(count: int) -> None:
    x, d = _matrices()
    exact, norms = d.t() @ x, row_norms(x)
    drawn, draws = torch.zeros(ROWS), 400

    def draw(key: int) -> Tensor:
        rows, index, factor = keep_rows(x, norms, count, key)
        assert len(index) == count
        assert torch.equal(rows, x[index])
        assert (index.diff() > 0).all()
        drawn[index] += 1
        return rows_product(d, rows, index, factor)

    found = bias((draw(key) for key in range(draws)), exact)
    # The squared error of the draws' mean, as a multiple of variance / draws: without bias it averages 1.
    assert found.ratio < 2
    winners = _winners(norms, count)
    assert (winners > 0) == (count > 24)
    heaviest = norms.argsort(descending=True)
    assert (drawn[heaviest[:winners]] == draws).all()
    rest = heaviest[winners:]
    chances = norms[rest] / norms[rest].sum()
    expected = (count - winners) * chances
    assert ((drawn[rest] / draws - expected).abs() < 5 * (expected * (1 - expected) / draws).sqrt() + 2 / draws).all()
    # The variance of count - winners independent draws with replacement.
    squares = (norms[rest] * d[rest].norm(dim=1)).square() / chances
    paper = (squares.sum() - (d[rest].t() @ x[rest]).square().sum()) / (count - winners)
    assert found.error**2 < 1.05 * float(paper / exact.square().sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_all_rows_are_kept_unchanged(dtype: torch.dtype) -> None:
    x, _ = _matrices(dtype)
    for count in (ROWS, ROWS + 1):
        rows, index, factor = keep_rows(x, row_norms(x), count, 1)
        assert torch.equal(rows, x)
        assert rows.data_ptr() != x.data_ptr()
        assert index.tolist() == list(range(ROWS))
        assert (factor == 1).all()


@pytest.mark.parametrize("large", ["rows", "gradients"])
def test_what_fits_fp16_gives_a_finite_product(large: str) -> None:
    x, d = _matrices(torch.float16)
    if large == "rows":
        x[:, 3] = 8000  # an outlier channel: 16 times it is more than fp16 holds
    else:
        x, d = x.sign() * 2**-6, d.clamp(-1, 1) * 2**15  # and so are gradients that were scaled up
    exact, norms, count = d.double().t() @ x.double(), row_norms(x), ROWS // 16

    def draw(key: int) -> Tensor:
        product = rows_product(d, *keep_rows(x, norms, count, key))
        assert product.dtype == torch.float32
        assert product.isfinite().all()
        return product.double()

    assert bias(map(draw, range(200)), exact).ratio < 2


def test_a_draw_depends_on_the_key_and_the_values_alone() -> None:
    x, _ = _matrices(torch.float32)

    def draw(x: Tensor, key: int) -> list[int]:
        return keep_rows(x, row_norms(x), 24, key)[1].tolist()

    state = torch.get_rng_state()
    assert draw(x, 1) == draw(x.clone(), 1)
    assert draw(x, 1) != draw(x, 2)
    assert draw(torch.ones(ROWS, 9), 1) != draw(torch.ones(ROWS, 9), 2)
    assert draw(x, 1) != draw(x * 1.1, 1)  # the same shares, another batch
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_rows_that_outweigh_all_others_are_kept(value: float) -> None:
    x, _ = _matrices(torch.float32)
    x[[5, 77], 3] = value
    for key in range(20):
        rows, index, factor = keep_rows(x, row_norms(x), 6, key)
        assert {5, 77} < set(index.tolist())
        assert torch.equal(rows[index == 5].nan_to_num(), x[5:6].nan_to_num())
        assert factor[index == 5] == 1


def test_rows_of_zeros_do_no_harm() -> None:
    for x in (torch.zeros(8, 3), torch.eye(8)[:, :3]):
        _, index, factor = keep_rows(x, row_norms(x), 4, 1)
        assert (len(index), bool(factor.isfinite().all())) == (4, True)
    rows, _, factor = keep_rows(torch.eye(8)[:, :3], row_norms(torch.eye(8)[:, :3]), 4, 1)
    assert torch.equal(factor @ rows, torch.ones(3))  # the three that are not zero, whole
