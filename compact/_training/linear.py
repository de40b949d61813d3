"""Compact linear: a linear layer that saves a projection of its input, or some of its rows, instead of the input.

Guarantees, with x [..., n], weight [out, n], output gradient d [..., out], projection P [n, r], z = x P [..., r]:

1. The output, the input gradient d W and the bias gradient are bit for bit those of `torch.nn.functional.linear`, from
   the same calls on the same shapes and strides. So no error propagates through the layers.
2. The weight gradient is (d^T z) P^T; its mean is the exact one, G = d^T x. Its error is (P P^T - I) applied to G for
   any number of tokens: larger batches do not average it out.
   With a sample of rows (`rows`) it is that of the kept rows, whose mean is the exact one too.
3. Saved for backward: the weight (if x needs a gradient) and z, or the rows, their indices and factors (if the weight
   does), as saved tensors, so hooks see them. Never x.
4. Forward under autocast casts as `linear` does; what is saved of x has the cast dtype.

CompAct: arXiv 2410.15352, section 3.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from .._errors import CodecError
from .._projection.projection import Projection, ProjectionKind, product
from .._projection.rows import Rows, rows_product
from .._projection.shared_input import SharedInput
from .._projection.subspace import Subspace

Method = Literal["projection", "wta-crs"]
METHODS: tuple[Method, ...] = get_args(Method)

# Bound at import, so that a replacement of `torch.nn.functional.linear` can call this module without recursion.
_linear = torch.nn.functional.linear


def compact_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    rank: int,
    key: int,
    kind: ProjectionKind = "gaussian",
    method: Method = "projection",
    shared: SharedInput | None = None,
) -> Tensor:
    """`linear(x, weight, bias)` that saves z = x P or rows of x: an exact input gradient, an unbiased weight gradient.

    The weight gradient is full-size, for any optimizer. Give every layer and step its own key (`compact.key(seed, name,
    step)`), and reuse it when checkpointing repeats a forward.

    Args:
        x: [..., n].
        weight: [out, n].
        bias: [out] or None.
        rank: r, 1 to n. With "wta-crs", the share r / n of the rows of x is kept, in as many bytes.
        key: 64 bits that determine P, or with x the rows.
        kind: kind of projection: "gaussian" (CompAct), "rademacher", "orthonormal", "sparse".
        method: "projection" (CompAct) or "wta-crs" (column-row sampling, arXiv 2305.15265), which has no kind.
        shared: keeps z, or the rows, for the next layer that reads this x with this key, kind, method and rank.

    Returns:
        [..., out].

    Raises:
        RankError: a rank below 1 or above n.
        CodecError: an unknown kind or method.
        RuntimeError: a second derivative, or shapes that do not fit.
    """
    if method not in METHODS:
        raise CodecError(f"method {method!r} is not known: choose one of {', '.join(METHODS)}")
    width = x.shape[-1]
    made = Rows(width, rank, key) if method == "wta-crs" else Projection(kind, width, rank, key)
    return _apply(x, weight, bias, made, None, shared)


def linear_into(
    x: Tensor, weight: Tensor, bias: Tensor | None, subspace: Subspace, shared: SharedInput | None
) -> Tensor:
    """`compact_linear` with the projection of `subspace`, which gets d^T z; the weight gets no gradient."""
    return _apply(x, weight, bias, subspace.projection(), subspace, shared)


def _apply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Projection | Rows,
    subspace: Subspace | None,
    shared: SharedInput | None,
) -> Tensor:
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return _linear(x, weight, bias)  # saves no input anyway
    # Autograd records the casts of x and bias; backward casts the weight again instead of keeping the cast.
    cast = _autocast(x)
    flat = cast.reshape(-1, cast.shape[-1])

    def make() -> tuple[Tensor, Tensor | None, Tensor | None]:
        if isinstance(projection, Rows):
            return projection.keep(flat.detach())
        return projection.project(flat.detach()), None, None

    # Looked up by the original x, because under autocast each layer has its own cast copy.
    z, index, factor = make() if shared is None else shared.projected(x, projection, cast.dtype, make)
    # For these layouts `linear` adds the bias within the product, for others after it, which changes the last bit.
    inside = bias is not None and (cast.dim() == 2 or cast.is_contiguous())
    out: Tensor = _CompactLinear.apply(  # type: ignore[no-untyped-call]  # torch has no types for it
        flat,
        weight,
        _autocast(bias) if bias is not None and inside else None,
        z,
        index,
        factor,
        _autocast_dtype(weight),
        projection,
        subspace,
    )
    out = out.view(*x.shape[:-1], out.shape[-1])
    return out if bias is None or inside else out + _autocast(bias)


class _CompactLinear(Function):
    """The layer for matrices. Its output must not be a view, which users could not change in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        z: Tensor,
        index: Tensor | None,
        factor: Tensor | None,
        dtype: torch.dtype,
        projection: Projection | Rows,
        subspace: Subspace | None,
    ) -> Tensor:
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, z, index, factor)
        ctx.projection, ctx.subspace, ctx.dtype, ctx.weight_dtype = projection, subspace, dtype, weight.dtype
        ctx.by_columns = x.stride() == (1, x.shape[0])
        with torch.autocast(x.device.type, enabled=False):
            return _linear(x, weight.to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        weight, z, index, factor = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        with torch.no_grad():
            if ctx.needs_input_grad[0]:
                w = weight.to(ctx.dtype)
                # Like the derivative of `mm`: by columns if x was stored by columns.
                grad_x = w.t().mm(grad.t()).t() if ctx.by_columns else grad.mm(w)
            if ctx.needs_input_grad[1] and index is not None:
                grad_weight = rows_product(grad, z, index, factor).to(ctx.weight_dtype)
            elif ctx.needs_input_grad[1]:
                # d^T z, [out, r]: CompAct's compressed gradient, transposed as torch's weights are.
                small = product(grad.t(), z)
                if ctx.subspace is None:
                    grad_weight = ctx.projection.back(small).to(ctx.weight_dtype)
                else:
                    ctx.subspace.add(ctx.projection, small.to(ctx.weight_dtype))
            if ctx.needs_input_grad[2]:
                grad_bias = grad.sum(0)
        if torch.is_grad_enabled():
            results = _FirstDerivativeOnly.apply(grad, grad_x, grad_weight, grad_bias)  # type: ignore[no-untyped-call]
            grad_x, grad_weight, grad_bias = results
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, None


class _FirstDerivativeOnly(Function):
    """Passes on the gradients of a backward with `create_graph`; raises when they are differentiated."""

    @staticmethod
    def forward(ctx: FunctionCtx, grad: Tensor, *results: Tensor | None) -> tuple[Tensor | None, ...]:
        return results

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> None:
        raise RuntimeError(
            "compact_linear was asked for a second derivative: it keeps a projection or some rows of its input, which "
            "give only first derivatives; use a plain linear layer with create_graph=True"
        )


def _autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to which autocast would cast an argument of `linear`."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def _autocast(tensor: Tensor) -> Tensor:
    return tensor.to(_autocast_dtype(tensor))
