"""Measures: on tensors whose errors are known."""

from __future__ import annotations

import math

import pytest
import torch

from compact import bias, cosine, relative_error

EXACT = torch.tensor([3.0, 4.0])


@pytest.mark.parametrize(
    ("found", "error", "angle"),
    [
        ([3.0, 4.0], 0.0, 1.0),
        ([6.0, 8.0], 1.0, 1.0),
        ([-3.0, -4.0], 2.0, -1.0),
        ([-4.0, 3.0], math.sqrt(2), 0.0),
        ([0.0, 0.0], 1.0, 0.0),
        ([3.3, 4.4], 0.1, 1.0),
    ],
)
def test_error_and_cosine(found: list[float], error: float, angle: float) -> None:
    assert relative_error(torch.tensor(found), EXACT) == pytest.approx(error, abs=1e-6)
    assert cosine(torch.tensor(found), EXACT) == pytest.approx(angle, abs=1e-6)


def test_zeros() -> None:
    zero = torch.zeros(2)
    assert relative_error(zero, zero) == 0.0
    assert relative_error(EXACT, zero) == math.inf
    assert cosine(zero, zero) == 1.0


def test_bf16_is_measured_in_fp64() -> None:
    exact = torch.full((1 << 16,), 1.0, dtype=torch.bfloat16)
    found = exact.clone()
    found[0] = 2.0
    assert relative_error(found, exact) == 2.0**-8


def test_shapes_must_agree() -> None:
    for measure in (relative_error, cosine):
        with pytest.raises(ValueError, match=r"shape \[1, 2\] with one of \[2\]"):
            measure(EXACT[None], EXACT)


def test_bias_of_known_draws() -> None:
    """Errors of +-1 that cancel, and a constant error that does not."""
    exact = torch.full((4,), 5.0)  # its norm is 10
    found = bias([exact + 1, exact - 1, exact + 1, exact - 1], exact)
    assert (found.draws, found.error, found.mean_error, found.ratio) == (4, 0.2, 0.0, 0.0)
    found = bias([exact + 1] * 9, exact)
    assert (found.error, found.mean_error, found.ratio) == pytest.approx((0.2, 0.2, 9.0))


def test_independent_draws_have_ratio_one_and_a_small_bias_shows() -> None:
    exact = torch.randn(10_000, generator=torch.Generator().manual_seed(0))

    def draws(shift: float):  # type: ignore[no-untyped-def]
        generator = torch.Generator().manual_seed(1)
        return (exact + torch.randn(10_000, generator=generator) + shift for _ in range(100))

    assert bias(draws(0.0), exact).ratio == pytest.approx(1, abs=0.06)
    assert bias(draws(0.2), exact).ratio == pytest.approx(1 + 100 * 0.04 / 1.04, abs=0.2)


def test_one_draw_says_nothing_of_bias() -> None:
    with pytest.raises(ValueError, match="bias of 1 draws"):
        bias([EXACT], EXACT)
