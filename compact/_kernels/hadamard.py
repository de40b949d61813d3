"""Rotation: groups of numbers times a randomized Hadamard matrix, H diag(s) / sqrt(g), against outliers.

It spreads an outlier over its group. Codes of few bits need this because the largest magnitude sets their step. It uses
only additions and subtractions in a fixed order and a factor that is a power of two, so every device gives the same
bits. The signs s are one fixed draw; without them a group's mean would concentrate in one coefficient.

The matrix is orthogonal: the inverse is diag(s) H / sqrt(g), and errors keep their Frobenius norm.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .._seeds import key, signs

_SIGN_KEY = 0x5E1F  # arbitrary; changing it changes the meaning of packed bytes


def is_rotatable(group: int) -> bool:
    """Whether 1 / sqrt(group) is a power of two, hence an exact factor: 4, 16, 64, 256, ..."""
    return group >= 4 and group & (group - 1) == 0 and int(math.log2(group)) % 2 == 0


@functools.lru_cache(maxsize=64)
def weights(group: int, device: torch.device) -> Tensor:
    """diag(s) / sqrt(g) as fp32 [group], read-only. Only the first call for a device waits for the device."""
    scaled = [float(sign) / math.sqrt(group) for sign in signs(key(_SIGN_KEY, group), group, "cpu").tolist()]
    with torch.inference_mode(False):  # the cache outlives the caller's mode
        return torch.tensor(scaled, dtype=torch.float32, device=device)


class Rotation:
    """Rotates blocks of `count` groups. Owns its scratch memory, so it serves one thread at a time.

    It works on the transposed block, [group, count]: torch's loops are fast on long rows, and so is the transposing
    copy.
    """

    def __init__(self, group: int, count: int, device: torch.device) -> None:
        self._weights = weights(group, device).unsqueeze(1)
        here, there = torch.empty(2, group, count, dtype=torch.float32, device=device).unbind(0)
        self._first = here
        # (upper, lower, their sums, their differences) of each round: views made once, as in `grouped._Scratch`.
        self._rounds: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        step = 1
        while step < group:
            shape = (group // (2 * step), 2, step * count)
            upper, lower = here.view(shape).unbind(1)
            sums, differences = there.view(shape).unbind(1)
            self._rounds.append((upper, lower, sums, differences))
            here, there = there, here
            step *= 2
        self._last = here

    def forward(self, values: Tensor, out: Tensor) -> None:
        """out = H diag(s) values / sqrt(g), per row. Both are [count, group] fp32 and may be the same tensor."""
        self._first.copy_(values.t())
        # Scaled first, so that magnitudes near the end of fp32 add up without overflow.
        self._first.mul_(self._weights)
        self._butterflies()
        out.copy_(self._last.t())

    def backward(self, values: Tensor, out: Tensor) -> None:
        """out = diag(s) H values / sqrt(g), per row: the inverse of `forward`."""
        self._first.copy_(values.t())
        self._butterflies()
        self._last.mul_(self._weights)
        out.copy_(self._last.t())

    def _butterflies(self) -> None:
        """_last = H _first, by log2(g) rounds of sums and differences."""
        for upper, lower, sums, differences in self._rounds:
            torch.add(upper, lower, out=sums)
            torch.sub(upper, lower, out=differences)
