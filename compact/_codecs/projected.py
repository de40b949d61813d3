"""Projected: the input x of a linear layer kept as z = x P, of rank r instead of width n. CompAct, arXiv 2410.15352.

Shapes: x [..., n], P [n, r], z [..., r].

If the engine replaces a linear layer, `compact_linear` computes the weight gradient from z. The input of an operator
that it cannot replace (a convolution) is decoded as x P P^T, whose mean is x. The relative squared error of either is
about n / r (see `Projection`), far more than quantization to as many bytes costs. It is here to reproduce CompAct, and
for ranks that quantization cannot reach.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._projection.projection import Projection, ProjectionKind, check_kind
from .._seeds import key as derive
from .codec import Packed, Pending, check_packed, verbatim, view_as
from .exact import Verbatim
from .ranked import Ranked
from .strided import Spec, Target, flat


@dataclass(frozen=True)
class Projected(Ranked):
    """A `Codec` for inputs of linear layers: bf16, fp16, fp32, fp64, not scalars.

    Strides come back exactly, except that a tensor whose elements share memory comes back contiguous.

    Args:
        rank: r as a number of columns (8), or as a share of the width (0.25), rounded down but at least 1.
        kind: "gaussian" (the paper's), "rademacher", "orthonormal" (the smallest error) or "sparse".

    Raises:
        CodecError: an invalid rank or an unknown kind.
    """

    kind: ProjectionKind = "gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind(self.kind)

    @property
    def name(self) -> str:
        """For example "gaussian n*0.25" or "orthonormal 8"."""
        return self._name(self.kind)

    def packed_nbytes(self, spec: Spec) -> int:
        """Bytes of z in x's dtype. Raises UnsupportedTensor, and RankError for a rank above the width."""
        self._check(spec)
        if not spec.numel:
            return 0
        width = spec.shape[-1]
        return spec.numel // width * self.rank_of(width, f"a {self.kind} projection") * spec.dtype.itemsize

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        """Queue the projection. The flag is False if the tensor must be kept verbatim."""
        spec = Spec.of(tensor)
        if not self.packed_nbytes(spec):
            empty = Packed(spec, "projected", (torch.empty(0, dtype=torch.uint8, device=tensor.device),), (key,))
            return Pending(None, lambda _: empty)
        projection = self._projection(spec, key)
        z = projection.project(flat(tensor, logical=True).view(-1, spec.shape[-1]))
        packed = Packed(spec, "projected", (z.view(-1).view(torch.uint8),), (key,))
        # By Cauchy-Schwarz no element of z P^T exceeds |z| times the norm of a row of P, which is at most 6 (a bell
        # ends at 5.98) or sqrt(n / r). A NaN or infinite norm is not below the bound either.
        row = max(6.0, math.sqrt(projection.width / projection.rank))
        largest = torch.linalg.vector_norm(z, dim=-1, dtype=torch.promote_types(z.dtype, torch.float32)).amax()
        flag = largest < torch.finfo(spec.dtype).max / (2 * row)
        return Pending(flag, lambda fine: packed if fine else verbatim(flat(tensor), spec))

    def decode(self, packed: Packed) -> Tensor:
        """Unpack x P P^T on the buffers' device."""
        spec = packed.spec
        buffer = check_packed(packed, self.name, {"projected": self.packed_nbytes(spec), "verbatim": spec.stored_bytes})
        if packed.form == "verbatim":
            return Verbatim().decode(packed)
        target = Target(spec, buffer.device, logical=True)
        if spec.numel:
            projection = self._projection(spec, packed.numbers[0])
            z = view_as(buffer, spec.dtype).view(-1, projection.rank)
            target.flat.copy_(projection.back(z).view(-1))
        return target.tensor()

    def _projection(self, spec: Spec, key: int) -> Projection:
        width = spec.shape[-1]
        rank = self.rank_of(width, f"a {self.kind} projection")
        # The key itself seeds other draws for this tensor.
        return Projection(self.kind, width, rank, derive(key, "projection"))
