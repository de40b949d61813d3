"""Tools for tests of `tba.audit`: a model whose saved bytes can be counted by hand, and a loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Feed(nn.Module):
    """[4, 8, 16] -> [4, 8, 16]; every byte it saves is counted below."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down, self.norm = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.down(self.act(self.up(x))))
        return out


def cube(out: Tensor) -> Tensor:
    """Not the square: its sum hardly changes with what a norm is given."""
    return (out**3).sum()


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    )
