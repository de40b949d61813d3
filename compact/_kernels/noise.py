"""Noise: the dither of stochastic rounding, from a key, the same on every device.

Element i of a tensor gets `base[i % 8192] ^ shift[i // 8192]`, both from the counter-based generator. Each value is
uniform, and any two are independent of each other (to 2**-32, see `_seeds`): of two elements in one block the bases
differ, in two blocks the shifts do. Pairwise independence is what the variance of any linear function of the decoded
tensor (a weight gradient) depends on, so that it is the same as with a fresh draw per element; drawing 16 bits per
element would cost more than all the rest of an encode.

Values are odd multiples of 2**-16 in (-0.5, 0.5): symmetric, so their mean is zero exactly; a code is rounded up with a
probability that is off by at most 2**-16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._seeds import key as derive
from .._seeds import uniform_bits

# 16 KiB of int16: stays in the first-level cache beside a block of values, and is quick to make for a small tensor.
PERIOD = 8192
UNIT = 2.0**-16


class Noise:
    """The dither of one tensor.

    Args:
        key: 64 bits.
        count: elements.
        device: of the tensor.

    Attributes:
        base: int16 [PERIOD], odd.
        shift: int16 [ceil(count / PERIOD)], even.
    """

    def __init__(self, key: int, count: int, device: torch.device) -> None:
        self.base = _halves(derive(key, "base"), PERIOD, device) | 1
        self.shift = _halves(derive(key, "shift"), -(-count // PERIOD), device) & ~1

    def fill(self, out: Tensor, start: int) -> None:
        """Write the noise of elements `start ...` in units of `UNIT`: odd integers below 2**15.

        Args:
            out: fp32 [n], contiguous.
            start: the first element's index.
        """
        written, count = 0, out.numel()
        while written < count:
            block, within = divmod(start + written, PERIOD)
            whole = (count - written) // PERIOD if within == 0 else 0
            if whole:
                piece = self.base ^ self.shift[block : block + whole, None]
                out[written : written + whole * PERIOD].view(whole, PERIOD).copy_(piece)
                written += whole * PERIOD
            else:
                length = min(PERIOD - within, count - written)
                out[written : written + length].copy_(self.base[within : within + length] ^ self.shift[block])
                written += length


def _halves(key: int, count: int, device: torch.device) -> Tensor:
    """`count` uniform int16 values: the two halves of each 32-bit word, low one first."""
    return uniform_bits(key, -(-count // 2), device).view(torch.int16)[:count]
