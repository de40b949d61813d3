"""Principal: activations in a principal and a random subspace, after PRAC (arXiv 2602.23111).

Our reading of the paper, not its code. An activation X of b tokens and n features is held as its coordinates in two
orthonormal bases, V [n, r1] of its principal directions and R [n, r2], drawn uniformly in their complement:

    held:      Z1 = X V,  Z2 = X R                      (r1 + r2) / n of the elements
    restored:  Z1 V^T + k Z2 R^T,  k = (n - r1) / r2    over draws of R its mean is X, since E[k R R^T] = 1 - V V^T

V is from a singular value decomposition of the activations of one batch, R from a QR decomposition; both are made anew
every `refresh` steps. Inputs of linear layers are held so, whose weight gradient is then unbiased and whose input
gradient is exact; and with a share of their own those of norms, whose backward is not linear in them. Inputs of
elementwise functions and attention's own tensors are kept, and so is what shares memory with those.

Shapes: X [..., n] -> Z [..., r1 + r2].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import compact

from .places import LINEAR, NORM, Place, PlacedHooks


@dataclass(frozen=True)
class Bases:
    """V and R beside each other, `basis` [n, r1 + r2], and the factor `k` of the last r2."""

    basis: Tensor
    principal: int
    k: float

    @classmethod
    def of(cls, x: Tensor, share: float, key: int) -> Bases:
        """Find the bases for an activation [..., n]; each has `share` of n directions, at least one."""
        rows = x.reshape(-1, x.shape[-1]).float()
        n = rows.shape[1]
        rank = min(max(1, round(share * n)), n - 1)
        principal = torch.linalg.svd(rows, full_matrices=False).Vh[:rank].t()
        r1 = principal.shape[1]
        r2 = min(rank, n - r1)
        generator = torch.Generator().manual_seed(key)
        drawn = torch.randn(n, r2, generator=generator)
        drawn -= principal @ (principal.t() @ drawn)
        return cls(torch.cat([principal, torch.linalg.qr(drawn).Q], 1), r1, (n - r1) / r2)

    def project(self, x: Tensor) -> Tensor:
        return x @ self.basis

    def restore(self, z: Tensor) -> Tensor:
        scaled = z.clone()
        scaled[..., self.principal :] *= self.k
        return scaled @ self.basis.t()


@dataclass(frozen=True)
class _Coordinates:
    z: Tensor
    bases: Bases

    @property
    def nbytes(self) -> int:
        return self.z.nbytes

    def restore(self) -> Tensor:
        return self.bases.restore(self.z)


class PrincipalHooks(PlacedHooks):
    """PRAC-like hooks.

    Args:
        model: to train.
        linear_share, norm_share: r1 and r2 alike, as a share of the width: of inputs of linear layers, and of norms;
            0 keeps those.
        refresh: steps until both bases are made anew.
        seed: of the draws.
    """

    def __init__(self, model: nn.Module, *, linear_share: float, norm_share: float, refresh: int, seed: int) -> None:
        super().__init__(model)
        self.period = refresh
        self._shares, self._seed = {LINEAR: linear_share, NORM: norm_share}, seed
        self._bases: dict[Place, Bases] = {}
        self._refreshes = 0
        self._learning = False

    def learn(self, run: Callable[[], None]) -> None:
        self._refreshes += 1
        self._learning = True
        try:
            with self.packing():
                run()
        finally:
            self._learning = False

    def encode(self, place: Place, tensor: Tensor) -> _Coordinates | None:
        share = self._shares.get(place.function, 0.0)
        if not share or self.is_kept(tensor):
            return None
        if self._learning:
            self._bases[place] = Bases.of(tensor, share, compact.key(self._seed, str(place), self._refreshes))
            return None
        bases = self._bases[place]
        return _Coordinates(bases.project(tensor), bases)
