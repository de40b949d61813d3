"""Subspace: the small space of one weight, with its current projection and the gradient accumulated in it.

A compact layer owns its Subspace, and its weight carries it as `weight.subspace`, where `CompActAdamW` finds it. The
layer's backward adds d^T z to `grad`; `weight.grad` stays None.

The optimizer changes the projection at a refresh, after a step. A gradient belongs to the projection of its forward, so
one that arrives after a refresh is an error: gradients in two bases cannot be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import _seeds
from .projection import Projection, ProjectionKind


@dataclass(eq=False)
class Subspace:
    """Small space of a weight of `out` x `width` (or, if `transposed`, `width` x `out`).

    Attributes:
        name: of the layer, for messages.
        kind: kind of projection.
        width: n, the number of input features.
        rank: r.
        alpha: factor of the update P N (CompAct, section 3; 0.25 there for pretraining, 2 to 4 for fine-tuning).
        period: T, steps between refreshes; None for never.
        base_key: 64 bits; with `refreshes` it determines the projection.
        transposed: the weight is [width, out], as in transformers' Conv1D.
        refreshes: s, how often the projection has changed.
        grad: [out, r], the sum of gradients since the last step; None if there was none.
    """

    name: str
    kind: ProjectionKind
    width: int
    rank: int
    alpha: float
    period: int | None
    base_key: int
    transposed: bool = False
    refreshes: int = 0
    grad: Tensor | None = field(default=None, repr=False)

    def projection(self) -> Projection:
        """The current P, [n, r]."""
        return Projection(self.kind, self.width, self.rank, _seeds.key(self.base_key, self.refreshes))

    @torch.no_grad()
    def add(self, projection: Projection, grad: Tensor) -> None:
        """Add a gradient [out, r] that belongs to `projection`.

        Raises:
            RuntimeError: the projection has been refreshed since that forward.
        """
        if projection != self.projection():
            raise RuntimeError(
                f"layer {self.name!r} got a gradient of a forward that ran before its projection was refreshed (it is "
                f"at refresh {self.refreshes} now): run backward before the optimizer step that follows the forward"
            )
        if self.grad is None:
            self.grad = grad
        else:
            self.grad += grad

    def refresh(self) -> None:
        """Change to the next projection; drop the gradient of the old one."""
        self.refreshes += 1
        self.grad = None


def subspace_of(parameter: Tensor) -> Subspace | None:
    """The subspace of a compact layer's weight; None for any other tensor."""
    found = getattr(parameter, "subspace", None)
    return found if isinstance(found, Subspace) else None


def subspaces_of(parameters: Iterable[Tensor]) -> Iterator[Subspace]:
    """The subspaces of these parameters, in their order."""
    return filter(None, map(subspace_of, parameters))
