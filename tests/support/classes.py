"""What autograd saves within a function, as `kind_of` classes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from compact import Saved
from tba._compress.calls import SavedBy, kind_of
from tba._torch.weights import is_weight

Found = list[tuple[str, tuple[int, ...]]]
B, S, N, M, HEADS, D = 2, 5, 8, 12, 3, 4


def saved(function: Callable[[], Any], mode: SavedBy | None = None) -> Found:
    """Class and shape of all that autograd saves but weights, sorted."""
    found: Found = []

    def pack(tensor: Tensor) -> Tensor:
        kind = kind_of(tensor)
        if is_weight(tensor):
            assert kind is Saved.UNKNOWN
        else:
            found.append((kind.value, tuple(tensor.shape)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), mode or SavedBy():
        function()
    return sorted(found)


def kinds(function: Callable[[], Any], mode: SavedBy | None = None) -> set[str]:
    return {kind for kind, _ in saved(function, mode)}


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


class Twice(Function):
    """A custom Function that saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


X = (B, S, N)
LINEAR = ("linear_input", (B * S, N))
NORM, STATISTIC = ("norm_input", X), ("norm_statistics", (B, S, 1))
FACTOR = ("product_factor", X)
