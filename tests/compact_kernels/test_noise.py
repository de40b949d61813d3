"""Noise: uniform, symmetric, pairwise independent, and the same in whatever pieces it is written."""

from __future__ import annotations

import math

import pytest
import torch

from compact._kernels.noise import PERIOD, UNIT, Noise

CPU = torch.device("cpu")


def noise(key: int, count: int) -> torch.Tensor:
    out = torch.empty(count)
    Noise(key, count, CPU).fill(out, 0)
    return out


def test_values_are_odd_and_within_a_half() -> None:
    values = noise(1, 3 * PERIOD)
    assert torch.equal(values.to(torch.int32).float(), values)
    assert bool((values.to(torch.int32) % 2 != 0).all())
    assert float(values.abs().max()) * UNIT < 0.5


@pytest.mark.parametrize("start", [0, 1, PERIOD - 1, PERIOD, PERIOD + 5, 2 * PERIOD])
@pytest.mark.parametrize("count", [1, 64, PERIOD, 2 * PERIOD + 7])
def test_pieces_are_those_of_the_whole(start: int, count: int) -> None:
    whole = noise(9, start + count)
    piece = torch.empty(count)
    Noise(9, start + count, CPU).fill(piece, start)
    assert torch.equal(piece, whole[start:])


def test_each_element_is_uniform_over_keys() -> None:
    """Mean, variance and the sixteen bins of two elements, one behind the first period, over 4096 keys."""
    draws = torch.stack([noise(key, 2 * PERIOD)[[17, PERIOD + 17]] for key in range(4096)]).double() * UNIT
    assert float(draws.mean(0).abs().max()) < 5 * math.sqrt(1 / 12 / 4096)
    torch.testing.assert_close(draws.var(0), torch.full((2,), 1 / 12, dtype=torch.float64), rtol=0.06, atol=0)
    for element in range(2):
        counts = torch.histc(draws[:, element], 16, -0.5, 0.5)
        assert float((counts - 256).square().sum() / 256) < 40  # chi-squared with 15 degrees: 40 is 1 in 2000


def test_the_variance_of_a_sum_is_the_sum_of_the_variances() -> None:
    """What pairwise independence is for: over keys, a weighted sum across four periods varies as if all were free."""
    weights = torch.randn(4 * PERIOD, generator=torch.Generator().manual_seed(0)).double()
    # The weights agree across periods, so noise that repeated with the period would sum to four times the variance.
    weights = weights[:PERIOD].repeat(4)
    sums = torch.stack([(noise(key, 4 * PERIOD).double() * UNIT) @ weights for key in range(2000)])
    wanted = float(weights.square().sum()) / 12
    assert float(sums.var()) == pytest.approx(wanted, rel=5 * math.sqrt(2 / 2000))


def test_keys_give_other_noise() -> None:
    assert float((noise(1, 1000) == noise(2, 1000)).float().mean()) < 0.01
