"""compact.sample_rows: weight gradients from some rows, unbiased, with the error their theory gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from compact import CodecError, RankError, RowSample, key, sample_rows
from compact._sampling import SAMPLING_KINDS, SamplingKind

ROWS, WIDTH, OUT, COUNT = 60, 12, 9, 20


def _problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of very different weight, gradients, the exact weight gradient, and the best importance."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(ROWS, 1, generator=generator, dtype=torch.float64) ** 4
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) * weights
    d = torch.randn(ROWS, OUT, generator=generator, dtype=torch.float64)
    return x, d, d.t() @ x, x.norm(dim=1) * d.norm(dim=1)


def _sample(kind: SamplingKind, importance: Tensor, draw: int, count: int = COUNT) -> RowSample:
    given = None if kind == "uniform" else importance
    return sample_rows(kind, len(importance), count, key(5, kind, draw), "cpu", given)


def _errors(kind: SamplingKind, draws: int) -> tuple[Tensor, float]:
    """The mean of many estimates, and their mean squared relative error."""
    x, d, exact, importance = _problem()
    mean, error = torch.zeros_like(exact), 0.0
    for draw in range(draws):
        sample = _sample(kind, importance, draw)
        estimate = sample.gradient(x[sample.indices], d)
        mean += estimate / draws
        error += ((estimate - exact).square().sum() / exact.square().sum()).item() / draws
    return mean, error


@pytest.mark.parametrize("kind", SAMPLING_KINDS)
def test_unbiased(kind: SamplingKind) -> None:
    _, _, exact, _ = _problem()
    draws = 1200
    mean, error = _errors(kind, draws)
    assert ((mean - exact).norm() / exact.norm()).item() < 2 * math.sqrt(error / draws)


def test_errors_are_those_of_the_theory() -> None:
    x, d, exact, importance = _problem()
    square, draws = exact.square().sum(), 1200
    # Without replacement: (b / k)(1 - k / b) b / (b - 1) (sum of squares - square of the mean).
    parts = (x.norm(dim=1) * d.norm(dim=1)).square().sum() / square - 1 / ROWS
    uniform = (ROWS / COUNT * (1 - COUNT / ROWS) * ROWS / (ROWS - 1) * parts).item()
    assert _errors("uniform", draws)[1] == pytest.approx(uniform, rel=0.1)
    crs = ((importance.sum() ** 2 / square - 1) / COUNT).item()
    assert _errors("crs", draws)[1] == pytest.approx(crs, rel=0.1)
    # A few rows weigh most of the sum here: winner takes all must gain by it.
    assert _errors("wta-crs", draws)[1] < 0.7 * crs


def test_uniform_takes_distinct_rows_and_all_of_them_are_exact() -> None:
    x, d, exact, importance = _problem()
    sample = _sample("uniform", importance, 0)
    assert len(sample.indices.unique()) == COUNT
    assert torch.equal(sample.scales, torch.full((COUNT,), ROWS / COUNT))
    everything = _sample("uniform", importance, 0, count=ROWS)
    torch.testing.assert_close(everything.gradient(x[everything.indices], d), exact)


def test_crs_draws_in_proportion_to_importance() -> None:
    importance = torch.tensor([1.0, 0.0, 3.0, 6.0])
    draws = torch.cat([_sample("crs", importance, draw, count=4).indices for draw in range(2000)])
    share = draws.bincount(minlength=4) / len(draws)
    assert (share - torch.tensor([0.1, 0.0, 0.3, 0.6])).abs().max() < 5 * math.sqrt(0.24 / len(draws))
    sample = _sample("crs", importance, 0, count=4)
    # 1 / (k p), where p is what was drawn with.
    torch.testing.assert_close(sample.scales, 1 / (4 * (importance / importance.sum())[sample.indices]))


def test_winner_takes_all_keeps_the_rows_that_make_the_rest_lightest() -> None:
    importance = torch.tensor([1.0, 40.0, 1.0, 30.0, 1.0, 1.0, 20.0, 1.0, 1.0, 4.0])
    count = 6
    # By hand: the share of what remains over the draws left, for 0 ... 5 rows kept, is least for four kept.
    ordered = importance.sort(descending=True).values
    worth = [ordered[kept:].sum().item() / (count - kept) for kept in range(count)]
    assert worth.index(min(worth)) == 4
    for draw in range(50):
        sample = _sample("wta-crs", importance, draw, count=count)
        assert sample.indices[:4].tolist() == [1, 3, 6, 9]
        assert torch.equal(sample.scales[:4], torch.ones(4))
        assert not set(sample.indices[4:].tolist()) & {1, 3, 6, 9}
        torch.testing.assert_close(sample.scales[4:], torch.full((2,), 6 / 2))


def test_even_weights_make_winner_takes_all_the_same_as_crs() -> None:
    sample = _sample("wta-crs", torch.ones(50), 1, count=10)
    torch.testing.assert_close(sample.scales, torch.full((10,), 5.0))


@pytest.mark.parametrize("kind", ["crs", "wta-crs"])
def test_no_value_is_asked_for(kind: SamplingKind) -> None:
    """On a device that would stall the host; the meta device has no values to ask for."""
    sample = sample_rows(kind, 64, 8, 3, "meta", torch.ones(64, device="meta"))
    assert (sample.indices.shape, sample.scales.shape) == ((8,), (8,))


@pytest.mark.parametrize("kind", ["crs", "wta-crs"])
def test_odd_importance(kind: SamplingKind) -> None:
    nothing = _sample(kind, torch.zeros(8), 0, count=8)
    assert torch.isfinite(nothing.scales).all()
    assert nothing.indices.max() < 8
    bad = torch.tensor([1.0, float("nan"), 1.0, 1.0])  # must be drawn, so that it shows
    assert 1 in _sample(kind, bad, 0, count=2).indices
    assert 2 in _sample(kind, torch.tensor([1.0, 1.0, float("inf"), 1.0]), 0, count=2).indices
    huge = _sample(kind, torch.full((5,), 1e308, dtype=torch.float64), 0, count=3)
    torch.testing.assert_close(huge.scales, torch.full((3,), 5 / 3, dtype=torch.float64), rtol=1e-7, atol=0)


def test_equal_keys_draw_alike_and_the_default_generator_is_not_moved() -> None:
    before = torch.get_rng_state()
    for kind in SAMPLING_KINDS:
        first, again, other = (_sample(kind, _problem()[3], draw) for draw in (1, 1, 2))
        assert torch.equal(first.indices, again.indices)
        assert torch.equal(first.scales, again.scales)
        assert not torch.equal(first.indices, other.indices)
    assert torch.equal(before, torch.get_rng_state())


def test_gradient_keeps_the_dtype() -> None:
    x, d, exact, importance = _problem()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        sample = _sample("uniform", importance, 0, count=ROWS)
        found = sample.gradient(x[sample.indices].to(dtype), d.to(dtype))
        assert found.dtype == dtype
        assert (found.double() - exact).norm() / exact.norm() < tolerance


def test_says_what_is_wrong() -> None:
    with pytest.raises(RankError, match="rank 9, but its width is 8"):
        sample_rows("uniform", 8, 9, 0, "cpu")
    with pytest.raises(CodecError, match="needs importance of shape"):
        sample_rows("crs", 8, 4, 0, "cpu")
    with pytest.raises(CodecError, match=r"shape \[8\], but got shape \[7\]"):
        sample_rows("wta-crs", 8, 4, 0, "cpu", torch.ones(7))
    with pytest.raises(CodecError, match="leave it out or use crs"):
        sample_rows("uniform", 8, 4, 0, "cpu", torch.ones(8))
    with pytest.raises(CodecError, match="'best' is not known"):
        sample_rows("best", 8, 4, 0, "cpu")  # type: ignore[arg-type]
