"""Moments: Adam's two running means of a gradient in a small space: their update and their change of basis.

Shapes: gradient, moments and update [out, r].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._projection.projection import Projection, product


def advance(
    first: Tensor, second: Tensor, gradient: Tensor, steps: int, betas: tuple[float, float], eps: float
) -> Tensor:
    """Update the moments with one gradient; return Adam's direction N (Kingma and Ba 2015, algorithm 1).

    Args:
        first, second: M and V, changed in place.
        gradient: G.
        steps: t, counted from 1, including this step.
        betas: decay of M and V.
        eps: added to the root of V.
    """
    beta1, beta2 = betas
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (second.sqrt() / math.sqrt(1 - beta2**steps)).add_(eps)
    return (first / denominator).div_(1 - beta1**steps)


def carry(first: Tensor, second: Tensor, old: Projection, new: Projection) -> None:
    """Change the basis of the moments, in place, to an estimate of their values had `new` been used all along.

    With C = P_old^T P_new, [r, r], and W = (r / n)^2 C * C:

        M = (r / n) M C                      least squares: the part of the mean gradient that lies in both spaces (as
                                             LDAdam, arXiv 2410.16103, carries its first moment)
        V = V W + (1 - sum(W)) mean(V)       variances of a sum add up; directions outside the old basis get the mean of
                                             those inside

    Exact for a full basis (r = n, orthonormal) if the covariance, of which Adam keeps the diagonal V, is diagonal.
    """
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    shrink = old.rank / old.width
    cross = new.project(old.matrix(wide, first.device).t())
    first.copy_(product(first.to(wide), cross).mul_(shrink))
    weights = cross.square_().mul_(shrink**2)
    unseen = (1 - weights.sum(0)).clamp_min_(0)
    known = second.to(wide)
    second.copy_(product(known, weights) + known.mean(1, keepdim=True) * unseen)
