"""Rows: a sample of a matrix's rows for an unbiased product (winner-take-all column-row sampling, arXiv 2305.15265).

For x [n, w] and d [n, out], d^T x is the sum of n products d_i^T x_i. If row i is kept with probability p_i, then the
sum of (d_i / p_i)^T x_i over the kept rows has d^T x as its mean. Guarantees:

1. Exactly k distinct rows are kept, in their order and unchanged, and 1 / p_i beside them. If all n are, it is 1.
2. p_i is |x_i| / t but at most 1, where t makes them sum to k. So the heaviest rows are always kept and are not scaled:
   as many as the paper's rule gives. The others are drawn without replacement, by systematic sampling in random order
   (Hartley and Rao 1962), so no byte goes to a row that is kept already. The paper draws them with replacement.
3. The draw depends on the key and on the bits of the norms, never on torch's generators: batches with one key get
   unrelated samples, and a forward that runs again gets the same one. Probabilities are ratios of integers, so no sum
   rounds. A device that rounds a norm otherwise may keep other rows.

The best p_i is proportional to |d_i| |x_i|, but forward does not know d. The paper estimates |d_i| by the gradient of
the same example in an earlier epoch, which takes a table of the data set. Here |x_i| decides alone, which is unbiased
too, but saves less variance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _seeds
from .projection import check_rank, product

_NORM_BITS = 24  # of a norm as an integer, if the sums leave so many


@dataclass(frozen=True)
class Rows:
    """How many rows of an input [n, width] to keep, and the key of the draw: k * width = n * rank, rounded down.

    So the kept rows take as many bytes as a projection of this rank. Beside them, 4 bytes a row say which they are, and
    4 more how much each counts.
    """

    width: int
    rank: int
    key: int

    def __post_init__(self) -> None:
        check_rank(self.rank, self.width, "a sample of rows")

    def count(self, tokens: int) -> int:
        """k for n tokens."""
        return max(tokens * self.rank // self.width, 1)

    def keep(self, x: Tensor, norms: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Keep rows of x [n, width]. `norms` and results are those of `keep_rows`."""
        return keep_rows(x, row_norms(x) if norms is None else norms, self.count(len(x)), self.key)


def row_norms(x: Tensor) -> Tensor:
    """Compute |x_i|, [n], for floating-point [n, w], in fp32 (fp64 for fp64)."""
    norms: Tensor = torch.linalg.vector_norm(x.detach(), dim=1, dtype=torch.promote_types(x.dtype, torch.float32))
    return norms


@torch.no_grad()
def keep_rows(x: Tensor, norms: Tensor, count: int, key: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keep `count` rows of x [n, w], or all if there are no more. Never waits for a device.

    Args:
        x: floating-point [n, w].
        norms: `row_norms(x)`.
        count: k, at least 1.
        key: 64 bits (`compact.key`).

    Returns:
        The kept rows, [k, w] in memory of its own; their indices, int32 [k], ascending; 1 / p_i, fp32 [k]. A row times
        1 / p_i may be too large for fp16.
    """
    if count >= len(x):
        index = torch.arange(len(x), dtype=torch.int32, device=x.device)
        return x.clone(), index, torch.ones(len(x), device=x.device, dtype=torch.float32)
    index, chance = _draw(norms, count, key)
    return x.index_select(0, index), index, chance.reciprocal().float()


@torch.no_grad()
def rows_product(d: Tensor, rows: Tensor, index: Tensor, factor: Tensor) -> Tensor:
    """Compute the sum of (d_i / p_i)^T x_i, [out, w], of what `keep_rows` returned and d [n, out] of its dtype.

    In d's dtype, but in fp32 for fp16, where d_i / p_i or the sum may be too large.
    """
    wide = torch.promote_types(d.dtype, torch.float32)
    scaled = d.index_select(0, index).to(wide).mul_(factor.unsqueeze(1))
    dtype = wide if d.dtype == torch.float16 else d.dtype
    return product(scaled.to(dtype).t(), rows.to(dtype))


def _draw(norms: Tensor, count: int, key: int) -> tuple[Tensor, Tensor]:
    """Draw `count` of n rows: their int32 indices, ascending, and p of each."""
    rows = len(norms)
    ends = torch.finfo(norms.dtype)
    # A row with NaN or infinity is among the heaviest, so the gradient shows it.
    norms = norms.nan_to_num(nan=ends.max, posinf=ends.max)
    # The largest number below is under count * rows * 2**bits. A row of zeros gets 1, so that every row has a chance.
    bits = max(min(_NORM_BITS, 62 - count.bit_length() - rows.bit_length()), 1)
    weights = (norms / norms.max().clamp(min=ends.tiny) * 2**bits).to(torch.int64).clamp(min=1)
    # Rows are always kept, heaviest first, while a row's share of what is left is more than one of the rows to draw.
    ordered = weights.sort(descending=True).values
    left = weights.sum() - ordered.cumsum(0) + ordered  # what is left before each row is taken
    budgets = count - torch.arange(count, device=norms.device)
    taken = (ordered[:count] * budgets > left[:count]).sum().view(1)
    unit = left.index_select(0, taken)
    # In units of 1 / unit, the p of all rows, which sum to count * unit. A row taken above has p = 1.
    chances = torch.minimum(weights * (count - taken), unit)
    # Lay the rows end to end in random order; points one unit apart, from a random one on, hit those to keep.
    words = _seeds.stir(
        _seeds.uniform_bits(_seeds.key(key, "order"), rows, norms.device), norms.float().view(torch.int32)
    )
    order = words.argsort(stable=True)
    first = torch.full_like(unit, _seeds.key(key, "first")) % unit
    points = torch.arange(count, device=norms.device) * unit + first
    hit = torch.searchsorted(chances.index_select(0, order).cumsum(0), points, right=True)
    index = order.index_select(0, hit).sort().values
    chance = chances.index_select(0, index).to(norms.dtype) / unit.to(norms.dtype)
    return index.to(torch.int32), chance
