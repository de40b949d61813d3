"""Moments: Adam's step in a small space, and its moments in another basis."""

from __future__ import annotations

import torch

from compact import Projection
from compact._training.moments import carry

BETAS, EPS = (0.9, 0.95), 1e-8


def test_carry_keeps_what_both_bases_hold() -> None:
    # The same full basis twice: nothing to do. Another full one: the mean gradient is expressed in it exactly.
    torch.manual_seed(0)
    old, new = (Projection("orthonormal", 32, 32, number) for number in (1, 2))
    mean = torch.randn(5, 32, dtype=torch.float64)
    first, second = old.project(mean), torch.rand(5, 32, dtype=torch.float64)
    same_first, same_second = first.clone(), second.clone()
    carry(same_first, same_second, old, old)
    torch.testing.assert_close(same_first, first)
    torch.testing.assert_close(same_second, second)
    moved_first, moved_second = first.clone(), second.clone()
    carry(moved_first, moved_second, old, new)
    torch.testing.assert_close(moved_first, new.project(mean))
    # Variances: those of a random gradient with independent coordinates in the old basis.
    torch.testing.assert_close(moved_second.sum(1), second.sum(1))
    samples = torch.randn(20000, 32, dtype=torch.float64) * second[0].sqrt()
    observed = new.project(old.back(samples)).var(0)
    assert ((moved_second[0] - observed) / observed).abs().max() < 0.06


def test_carry_into_a_partly_new_basis() -> None:
    torch.manual_seed(0)
    old, new = (Projection("orthonormal", 64, 16, number) for number in (1, 2))
    mean = torch.randn(400, 64, dtype=torch.float64)
    first, second = old.project(mean), torch.full((400, 16), 3.0, dtype=torch.float64)
    moved = first.clone()
    carry(moved, second, old, new)
    wanted = new.project(mean)
    # The best linear guess: what is left of the error is not correlated with the guess, and less than without one.
    left = wanted - moved
    assert abs((left * moved).sum() / moved.square().sum()) < 0.05
    assert left.norm() < wanted.norm()
    assert moved.norm() > 0.4 * wanted.norm()  # a quarter of the energy: n / r is 4
    torch.testing.assert_close(second, torch.full_like(second, 3.0))  # of equal variances nothing can be told apart
