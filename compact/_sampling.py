"""RowSample: k of b token rows, and the factors that make a weight gradient from them unbiased.

With rows x_i, output gradients d_i and the exact gradient G = sum_i d_i x_i^T, the sample gives
G_hat = sum_j scale_j d_i(j) x_i(j)^T with the mean G:

uniform   k distinct rows, scale b / k
crs       k draws with replacement, row i with probability p_i, scale 1 / (k p_i) (column-row sampling: Drineas et
          al. 2006). Its error is least for p_i in proportion to |x_i| |d_i|.
wta-crs   the c most probable rows once each with scale 1, k - c draws from the rest with scale
          P_rest / ((k - c) p_i), where c < k makes P_rest / (k - c) least (Liu et al., arXiv 2305.15265):
          better than crs where few rows weigh much, the same where c = 0

d_i is not known in forward. Pass what is known of it, such as the norms of an earlier step, as `importance`; with
|x_i| alone crs is hardly better than uniform.

Probabilities are integers w_i / sum(w), each at least 1, so that every row can be drawn, cumulative sums are exact,
and equal norms give equal indices on every device. Nothing waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from . import _seeds
from ._errors import CodecError
from ._products import product
from ._projection import check_rank

SamplingKind = Literal["uniform", "crs", "wta-crs"]
SAMPLING_KINDS: tuple[SamplingKind, ...] = get_args(SamplingKind)

# Sum of the integer weights, at most: below 2**31, as `_seeds.indices` wants.
_TOTAL = 1 << 30


@dataclass(frozen=True)
class RowSample:
    """Which rows were drawn.

    Attributes:
        indices: int64 [k], the rows; crs may repeat one.
        scales: fp32 [k] (fp64 for fp64 importance).
    """

    indices: Tensor
    scales: Tensor

    @torch.no_grad()
    def gradient(self, rows: Tensor, grad_output: Tensor) -> Tensor:
        """G_hat, [out, n], from the drawn rows [k, n] of x and grad_output [b, out], in grad_output's dtype."""
        drawn = grad_output.index_select(0, self.indices)
        return product((drawn * self.scales.unsqueeze(1)).to(grad_output.dtype).t(), rows)


@torch.no_grad()
def sample_rows(
    kind: SamplingKind,
    rows: int,
    count: int,
    key: int,
    device: torch.device | str,
    importance: Tensor | None = None,
) -> RowSample:
    """Draw `count` of `rows` rows.

    Args:
        kind: "uniform", "crs", "wta-crs".
        rows: b.
        count: k, 1 to b.
        key: 64 bits.
        device: where.
        importance: [b], not negative, on that device; needed by crs and wta-crs, which draw in proportion to it.

    Raises:
        RankError: a count that is not 1 to b.
        CodecError: an unknown kind; importance that is missing, superfluous or of another size.
    """
    if kind not in SAMPLING_KINDS:
        raise CodecError(f"sampling kind {kind!r} is not known: choose one of {', '.join(SAMPLING_KINDS)}")
    check_rank(count, rows, f"a {kind} sample of rows")
    if kind == "uniform":
        if importance is not None:
            raise CodecError("a uniform sample was given importance, which it does not use: leave it out or use crs")
        indices = _seeds.permutation(key, rows, device)[:count].sort().values
        return RowSample(indices, torch.full((count,), rows / count, device=device))
    if importance is None or importance.shape != (rows,):
        found = "none" if importance is None else f"shape {list(importance.shape)}"
        raise CodecError(f"a {kind} sample of {rows} rows needs importance of shape [{rows}], but got {found}")
    weights = _integer_weights(importance)
    if kind == "crs":
        indices = _draw(weights, key, count, weights.sum())
        return RowSample(indices, _ratio(weights.sum(), count * weights[indices], importance.dtype))
    return _winner_take_all(weights, count, key, importance.dtype)


def _winner_take_all(weights: Tensor, count: int, key: int, dtype: torch.dtype) -> RowSample:
    sorted_weights, order = weights.sort(descending=True, stable=True)
    # What remains after the first c rows, for c = 0 ... k - 1.
    remains = sorted_weights.sum() - sorted_weights.cumsum(0) + sorted_weights
    # Quotients of integers below 2**53 are rounded alike everywhere.
    slots = torch.arange(count, 0, -1, device=weights.device)
    worth = remains[:count].double() / slots
    # The first least value, counted without asking the device: all before it are larger.
    kept = (worth > worth.amin()).long().cumprod(0).sum()
    # Not `remains[kept]`, which asks the device for the number.
    rest, drawn = (values.index_select(0, kept.view(1)).view(()) for values in (remains, slots))
    position = torch.arange(len(weights), device=weights.device)
    picks = _draw(torch.where(position < kept, 0, sorted_weights), key, count, rest)
    slot = position[:count]
    places = torch.where(slot < kept, slot, picks)
    scales = _ratio(rest, drawn * sorted_weights[places], dtype)
    return RowSample(order[places], torch.where(slot < kept, 1.0, scales))


def _integer_weights(importance: Tensor) -> Tensor:
    """Integers of at least 1 in proportion to importance, int64 [b], with a sum below 2**31.

    NaN counts as infinity, and infinity outweighs all else: such a row is drawn and shows in the gradient.
    """
    huge = 1e300
    share = importance.double().nan_to_num(huge, huge).clamp_min(0.0)
    share = share / share.amax().clamp_min(torch.finfo(torch.float64).tiny)
    share = share / share.sum().clamp_min(1.0)
    return (share * _TOTAL).to(torch.int64).add_(1)


def _draw(weights: Tensor, key: int, count: int, total: Tensor) -> Tensor:
    """`count` independent rows, row i with probability weights[i] / total."""
    below = _seeds.indices(key, count, total, weights.device)
    return torch.searchsorted(weights.cumsum(0), below, right=True)


def _ratio(numerator: Tensor, denominator: Tensor, dtype: torch.dtype) -> Tensor:
    return (numerator.double() / denominator).to(torch.promote_types(dtype, torch.float32))
