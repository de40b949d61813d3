"""Rotation: orthogonal, exact on small integers, its own inverse up to signs."""

from __future__ import annotations

import math

import pytest
import torch

from compact._kernels.hadamard import Rotation, is_rotatable, weights

CPU = torch.device("cpu")


def hadamard(order: int) -> torch.Tensor:
    """Sylvester's construction."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < order:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


@pytest.mark.parametrize("group", [4, 16, 64, 256])
def test_it_is_the_signed_hadamard_matrix(group: int) -> None:
    """Exactly: small integers lose nothing in fp32."""
    values = torch.randint(-1000, 1000, (37, group)).float()
    out = torch.empty_like(values)
    Rotation(group, 37, CPU).forward(values, out)
    signs = weights(group, CPU).sign().double()
    assert torch.equal(out.double(), (values.double() * signs) @ hadamard(group).t() / math.sqrt(group))


@pytest.mark.parametrize("group", [4, 16, 64, 256])
def test_backward_undoes_forward(group: int) -> None:
    values = torch.randint(-1000, 1000, (50, group)).float()
    rotation, out = Rotation(group, 50, CPU), values.clone()
    rotation.forward(out, out)
    assert not torch.equal(out, values)
    rotation.backward(out, out)
    assert torch.equal(out, values)


def test_signs_are_balanced_and_fixed() -> None:
    signs = weights(64, CPU) * 8
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(float(signs.sum())) <= 24
    # Changing them changes what packed bytes mean.
    assert "".join("+" if sign > 0 else "-" for sign in signs[:16].tolist()) == "----++-+++--++--"


@pytest.mark.parametrize(("group", "wanted"), [(2, False), (4, True), (8, False), (32, False), (64, True), (48, False)])
def test_only_squares_of_powers_of_two_keep_the_factor_exact(group: int, wanted: bool) -> None:
    assert is_rotatable(group) is wanted
