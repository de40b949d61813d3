"""Noise: the dither of stochastic rounding, made from a key with the same bits on every device.

Element i of a tensor gets `base[i % 8192] ^ shift[i // 8192]`, both from the counter-based generator. Each value is
uniform, and any two are independent (to 2**-32, see `_seeds`): two elements of one block have different bases, two of
different blocks have different shifts. The variance of a linear function of the decoded tensor (a weight gradient)
depends only on pairwise independence, so it equals that of a fresh draw per element. Drawing 16 bits per element would
cost more than the rest of an encode.

Values are odd multiples of 2**-16 in (-0.5, 0.5): symmetric, so their mean is exactly zero. The probability to round a
code up is off by at most 2**-16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._seeds import key as derive
from .._seeds import uniform_bits

# 16 KiB of int16: fits the L1 cache beside a block of values, and is quick to make for a small tensor.
PERIOD = 8192
UNIT = 2.0**-16


class Noise:
    """Dither of one tensor of `count` elements on `device`, from 64 bits of `key`.

    Attributes:
        base: int16 [PERIOD], odd.
        shift: int16 [ceil(count / PERIOD)], even.
    """

    def __init__(self, key: int, count: int, device: torch.device) -> None:
        self.base = _halves(derive(key, "base"), PERIOD, device) | 1
        self.shift = _halves(derive(key, "shift"), -(-count // PERIOD), device) & ~1

    def fill(self, out: Tensor, start: int) -> None:
        """Write the noise of elements from `start` on, in units of `UNIT` (odd integers), to `out`: fp32 [n],
        contiguous.
        """
        block, within = divmod(start, PERIOD)
        end = -(-(start + out.numel()) // PERIOD)
        blocks = self.base ^ self.shift[block:end, None]
        out.copy_(blocks.view(-1)[within : within + out.numel()])


def _halves(key: int, count: int, device: torch.device) -> Tensor:
    """Make `count` uniform int16 values: the two halves of each 32-bit word, low half first."""
    return uniform_bits(key, -(-count // 2), device).view(torch.int16)[:count]
