"""Sampled: the input x of a linear layer kept as some of its rows (tokens). WTA-CRS, arXiv 2305.15265; see `rows`.

Shapes: x [..., n] as rows [tokens, n].

If the engine replaces a linear layer, `compact_linear` computes the weight gradient from the kept rows. The input of an
operator that it cannot replace is decoded with zeros for the other rows. The mean of either is the exact one. The
decoded rows are x_i / p_i, and are packed so; if one is too large for the dtype, the tensor is kept verbatim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._projection.rows import Rows, row_norms
from .._seeds import key as derive
from .codec import Packed, Pending, check_packed, verbatim, view_as
from .exact import Verbatim
from .ranked import Ranked
from .strided import Spec, Target, flat

_INDEX_BYTES = 4


@dataclass(frozen=True)
class Sampled(Ranked):
    """A `Codec` for inputs of linear layers: bf16, fp16, fp32, fp64, not scalars.

    Strides come back exactly, except that a tensor whose elements share memory comes back contiguous.

    Args:
        rank: as that of `Projected`, whose bytes the kept rows take: r of n columns there, here the share r / n of the
            rows, rounded down but at least one. An index takes 4 bytes a row more.

    Raises:
        CodecError: an invalid rank.
    """

    @property
    def name(self) -> str:
        """For example "wta-crs n*0.25"."""
        return self._name("wta-crs")

    def packed_nbytes(self, spec: Spec) -> int:
        """Bytes of the rows and indices, or of all elements if those are no more. Raises as `Projected` does."""
        self._check(spec)
        return min(self._sampled_bytes(spec), spec.stored_bytes)

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        """Queue the sample. The flag is False if the tensor must be kept verbatim."""
        spec = Spec.of(tensor)
        if self.packed_nbytes(spec) == spec.stored_bytes:
            return Verbatim().begin(tensor)
        x = flat(tensor, logical=True).view(-1, spec.shape[-1])
        norms = row_norms(x)
        kept, index, factor = self._rows(spec, key).keep(x, norms)
        rows = (kept.to(norms.dtype) * factor.unsqueeze(1)).to(spec.dtype)
        buffer = torch.cat((rows.view(-1).view(torch.uint8), index.view(torch.uint8)))
        packed = Packed(spec, "sampled", (buffer,))
        flag = norms.isfinite().all() & rows.isfinite().all()
        return Pending(flag, lambda fine: packed if fine else verbatim(flat(tensor), spec))

    def decode(self, packed: Packed) -> Tensor:
        """Unpack the kept rows among zeros, on the buffers' device."""
        spec = packed.spec
        nbytes = self._sampled_bytes(spec)
        buffer = check_packed(packed, self.name, {"sampled": nbytes, "verbatim": spec.stored_bytes})
        if packed.form == "verbatim":
            return Verbatim().decode(packed)
        width = spec.shape[-1]
        index_bytes = _INDEX_BYTES * self._rows(spec, 0).count(spec.numel // width)
        rows, index = buffer.split((nbytes - index_bytes, index_bytes))
        target = Target(spec, buffer.device, logical=True)
        x = target.flat.zero_().view(-1, width)
        x.index_copy_(0, view_as(index, torch.int32).long(), view_as(rows, spec.dtype).view(-1, width))
        return target.tensor()

    def _rows(self, spec: Spec, key: int) -> Rows:
        width = spec.shape[-1]
        # The key itself seeds other draws for this tensor.
        return Rows(width, self.rank_of(width, "a sample of rows"), derive(key, "rows"))

    def _sampled_bytes(self, spec: Spec) -> int:
        if not spec.numel:
            return 0
        width = spec.shape[-1]
        return self._rows(spec, 0).count(spec.numel // width) * (width * spec.dtype.itemsize + _INDEX_BYTES)
