"""Sketch: what is saved of a linear layer's input x, and the weight gradient made of it without x.

With x [b tokens, n features], output gradient d [b, out] and the exact gradient G = d^T x:

FeatureSketch   saves z = x P, [b, r], P over features; (d^T z) P^T. CompAct (arXiv 2410.15352, section 3). Its error
                is (P P^T - I) applied to G, whatever b: larger batches do not average it out.
TokenSketch     saves P^T x, [r, n], P over tokens; (P^T d)^T (P^T x). Its error falls with r / b, and what it saves
                does not grow with b.
RowSketch       saves r rows of x, their places and scales: `_sampling`.

All have the mean G. Sketches are immutable and compare equal when they would save the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from . import _projection, _sampling
from ._errors import CodecError
from ._products import product
from ._projection import Projection, ProjectionKind
from ._sampling import RowSample, SamplingKind

Over = Literal["features", "tokens"]


class Sketch(Protocol):
    """Saves a part of x and makes the weight gradient from it."""

    def save(self, x: Tensor, importance: Tensor | None = None) -> tuple[Tensor, ...]:
        """What to keep of x [b, n]. Raises RankError for a rank that x is too small for."""

    def weight_grad(self, saved: tuple[Tensor, ...], grad_output: Tensor) -> Tensor:
        """G_hat, [out, n], from what `save` returned and grad_output [b, out], in their dtype."""


@dataclass(frozen=True)
class FeatureSketch:
    """Saves z = x P."""

    projection: Projection

    @torch.no_grad()
    def save(self, x: Tensor, importance: Tensor | None = None) -> tuple[Tensor, ...]:
        """(z,), z [b, r]."""
        _refuse(importance, self.projection.kind)
        return (self.projection.project(x),)

    @torch.no_grad()
    def small_grad(self, saved: tuple[Tensor, ...], grad_output: Tensor) -> Tensor:
        """d^T z, [out, r]: CompAct's compressed gradient, transposed as torch's weights are."""
        return product(grad_output.t(), saved[0])

    @torch.no_grad()
    def weight_grad(self, saved: tuple[Tensor, ...], grad_output: Tensor) -> Tensor:
        """(d^T z) P^T."""
        return self.projection.back(self.small_grad(saved, grad_output))


@dataclass(frozen=True)
class TokenSketch:
    """Saves P^T x. The projection's width is the number of tokens, known with x."""

    kind: ProjectionKind
    rank: int
    key: int

    @torch.no_grad()
    def save(self, x: Tensor, importance: Tensor | None = None) -> tuple[Tensor, ...]:
        """(P^T x,), [r, n]."""
        _refuse(importance, self.kind)
        return (self._projection(len(x)).project(x, dim=0),)

    @torch.no_grad()
    def weight_grad(self, saved: tuple[Tensor, ...], grad_output: Tensor) -> Tensor:
        """(P^T d)^T (P^T x)."""
        return product(self._projection(len(grad_output)).project(grad_output, dim=0).t(), saved[0])

    def _projection(self, tokens: int) -> Projection:
        return Projection(self.kind, tokens, self.rank, self.key)


@dataclass(frozen=True)
class RowSketch:
    """Saves rows of x. For crs and wta-crs row i counts |x_i| times its importance."""

    kind: SamplingKind
    rank: int
    key: int

    @torch.no_grad()
    def save(self, x: Tensor, importance: Tensor | None = None) -> tuple[Tensor, ...]:
        """(rows [r, n], indices int32 [r], scales [r])."""
        if self.kind == "uniform":
            _refuse(importance, self.kind)
            weights = None
        else:
            weights = torch.linalg.vector_norm(x, dim=1, dtype=torch.promote_types(x.dtype, torch.float32))
            if importance is not None:
                if importance.numel() != len(x):
                    shape = list(importance.shape)
                    raise CodecError(f"importance of shape {shape} was given for {len(x)} tokens: give each a number")
                weights = weights * importance.reshape(-1)
        sample = _sampling.sample_rows(self.kind, len(x), self.rank, self.key, x.device, weights)
        return x.index_select(0, sample.indices), sample.indices.to(torch.int32), sample.scales

    @torch.no_grad()
    def weight_grad(self, saved: tuple[Tensor, ...], grad_output: Tensor) -> Tensor:
        """The sum of scale_j d_j x_j^T over the rows."""
        rows, indices, scales = saved
        return RowSample(indices.long(), scales).gradient(rows, grad_output)


def make_sketch(kind: str, over: Over | None, width: int, rank: int, key: int) -> Sketch:
    """The sketch of these names.

    Args:
        kind: a projection ("gaussian", "rademacher", "orthonormal", "sparse") or a sampling ("uniform", "crs",
            "wta-crs").
        over: "features" (projections only) or "tokens"; None is features for a projection, tokens for a sampling.
        width: n, features of x.
        rank: r, of features or of tokens.
        key: 64 bits.

    Raises:
        CodecError: names that are not known or do not go together.
        RankError: more features than there are.
    """
    if over not in (None, "features", "tokens"):
        raise CodecError(f'over {over!r} is not known: choose "features" or "tokens"')
    if kind in _sampling.SAMPLING_KINDS:
        if over == "features":
            raise CodecError(f'{kind} draws tokens, but over is "features": say over="tokens"')
        return RowSketch(kind, rank, key)
    if kind not in _projection.KINDS:
        known = ", ".join((*_projection.KINDS, *_sampling.SAMPLING_KINDS))
        raise CodecError(f"kind {kind!r} is not known: choose one of {known}")
    if over == "tokens":
        return TokenSketch(kind, rank, key)
    return FeatureSketch(Projection(kind, width, rank, key))


def _refuse(importance: Tensor | None, kind: str) -> None:
    if importance is not None:
        raise CodecError(f"{kind} was given importance, which only crs and wta-crs use: leave it out")
