"""Walsh and Buckets: transforms of columns by sums and differences in a fixed order.

Shapes: a block is [width n, columns c], so every loop runs along contiguous columns.

Mixing multiplies by Q * sqrt(L), where n = m * L, L is the largest power of two that divides n, and Q is the orthogonal

    Q = (R kron H / sqrt(L)) diag(s),    R = I - (2 / m) J  (identity for m = 1),    H Sylvester's Hadamard matrix

with signs s. So a width that is not a power of two is split into m blocks that a Householder reflection combines, and Q
stays exactly n x n and orthogonal; padding to the next power of two would raise the variance of a sample of its rows.
(An odd width has L = 1, and Q is close to diagonal: a sample of its rows is still unbiased with the same mean error,
but for a vector with one large element that error varies more.)

The operations behind each element, and their order, do not depend on the number of columns or threads, or on the
device. A product and a difference are two kernels, so nothing is fused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Walsh:
    """Maps columns [n, c] to a sample of `rank` rows of the mixed columns, times sqrt(m / rank); and its transpose.

    Args:
        signs: [n] of -1 and 1, in the columns' dtype.
        selected: int64 [rank], distinct, ascending.
    """

    def __init__(self, signs: Tensor, selected: Tensor) -> None:
        self.width = len(signs)
        self._length = self.width & -self.width
        self._blocks = self.width // self._length
        self._signs = signs.unsqueeze(1)
        self._selected = selected
        self._scale = math.sqrt(self._blocks / max(len(selected), 1))

    def down(self, columns: Tensor) -> Tensor:
        """Map [n, c] to [rank, c]. Overwrites its argument."""
        columns.mul_(self._signs)
        return self._mix(columns).index_select(0, self._selected).mul_(self._scale)

    def up(self, small: Tensor) -> Tensor:
        """Map [rank, c] to [n, c]."""
        columns = small.new_zeros(self.width, small.shape[1])
        columns.index_copy_(0, self._selected, small * self._scale)
        return self._mix(columns).mul_(self._signs)

    def _mix(self, a: Tensor) -> Tensor:
        """Compute (R kron H) a, overwriting a. R and H are symmetric, so this is also the transpose."""
        columns, b, step = a.shape[1], torch.empty_like(a), 1
        while step < self._length:
            shape = (self.width // (2 * step), 2, step * columns)
            (upper, lower), (sums, differences) = a.view(shape).unbind(1), b.view(shape).unbind(1)
            torch.add(upper, lower, out=sums)
            torch.sub(upper, lower, out=differences)
            a, b, step = b, a, 2 * step
        if self._blocks > 1:
            blocks = a.view(self._blocks, self._length, columns)
            blocks.sub_(fold(blocks).mul_(2 / self._blocks))
        return a


class Buckets:
    """Maps columns [n, c] to sums of `rank` buckets of n // rank or one more signed rows each; and its transpose.

    Args:
        signs: [n] of -1 and 1, in the columns' dtype, for rows in the order below.
        order: int64 [n], a permutation: row order[i] goes to bucket i % rank.
        rank: buckets.
    """

    def __init__(self, signs: Tensor, order: Tensor, rank: int) -> None:
        self._signs = signs.unsqueeze(1)
        self._order = order
        self._rank = rank
        self.width = len(order)

    def down(self, columns: Tensor) -> Tensor:
        """Map [n, c] to [rank, c]."""
        signed = columns.index_select(0, self._order).mul_(self._signs)
        rounds, rest = divmod(self.width, self._rank)
        total = fold(signed[: rounds * self._rank].view(rounds, self._rank, -1))
        total[:rest] += signed[rounds * self._rank :]
        return total

    def up(self, small: Tensor) -> Tensor:
        """Map [rank, c] to [n, c]."""
        bucket = torch.arange(self.width, device=small.device) % self._rank
        columns = small.new_empty(self.width, small.shape[1])
        return columns.index_copy_(0, self._order, small.index_select(0, bucket).mul_(self._signs))


def fold(slices: Tensor) -> Tensor:
    """Sum over the first dimension into new memory: halves are added to each other; an odd last slice comes last."""
    total = slices
    while len(total) > 1:
        half = len(total) // 2
        odd = total[2 * half :]
        total = total[:half] + total[half : 2 * half]
        if len(odd):
            total[:1] += odd
    return total[0].clone() if total is slices else total[0]
