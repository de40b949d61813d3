"""Measures: how far a decoded tensor, or a gradient computed from it, is from the exact one.

All are computed in fp64 over all elements and returned as Python floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


def relative_error(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact| in Frobenius norms; 0.0 if both are zero, infinite if only `exact` is."""
    error, size = _norm(_minus(found, exact)), _norm(exact.detach().double())
    if size == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / size


def cosine(found: Tensor, exact: Tensor) -> float:
    """Cosine of the angle between the two as vectors; 1.0 if both are zero, 0.0 if only one is."""
    _same_shape(found, exact)
    a, b = found.detach().double().flatten(), exact.detach().double().flatten()
    sizes = _norm(a), _norm(b)
    if 0.0 in sizes:
        return 1.0 if sizes[0] == sizes[1] else 0.0
    return float(torch.dot(a / sizes[0], b / sizes[1]))


class Bias(NamedTuple):
    """Statistics of many draws of an estimate.

    Attributes:
        draws: their number.
        error: relative error of one draw, root mean square over the draws.
        mean_error: relative error of the mean of all draws. Without bias it falls as 1 / sqrt(draws).
        ratio: (mean_error / (error / sqrt(draws)))**2. Without bias it averages 1; with bias it grows with the draws.
    """

    draws: int
    error: float
    mean_error: float
    ratio: float


def bias(draws: Iterable[Tensor], exact: Tensor) -> Bias:
    """Compare the mean of independent draws with the exact tensor. Consumes one draw at a time, so they may be lazy.

    Raises:
        ValueError: fewer than two draws.
    """
    total, squares, count = torch.zeros_like(exact, dtype=torch.float64), 0.0, 0
    for draw in draws:
        error = _minus(draw, exact)
        total += error
        squares += _norm(error) ** 2
        count += 1
    if count < 2:
        raise ValueError(f"the bias of {count} draws cannot be separated from their noise: give at least two")
    size = _norm(exact.detach().double())
    if squares == 0.0:
        return Bias(count, 0.0, 0.0, 0.0)
    mean_error = _norm(total) / count
    ratio = mean_error**2 * count / (squares / count)
    if size == 0.0:
        return Bias(count, math.inf, math.inf, ratio)
    return Bias(count, math.sqrt(squares / count) / size, mean_error / size, ratio)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _minus(found: Tensor, exact: Tensor) -> Tensor:
    _same_shape(found, exact)
    return found.detach().double() - exact.detach().double()


def _same_shape(found: Tensor, exact: Tensor) -> None:
    if found.shape != exact.shape:
        raise ValueError(f"cannot compare a tensor of shape {list(found.shape)} with one of {list(exact.shape)}")
