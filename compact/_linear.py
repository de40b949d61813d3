"""Compact linear: a linear layer that saves a sketch of its input instead of the input.

What holds, with x [..., n], weight [out, n], output gradient d [..., out]:

1. The output, the input gradient d W and the bias gradient are those of `torch.nn.functional.linear`, bit for bit:
   the same calls on the same shapes and strides. So no error travels through the layers.
2. The weight gradient is made from the sketch and has the exact one as its mean; its error is the sketch's.
3. Saved for backward: the weight (if x needs a gradient) and the sketch (if the weight does), both as saved tensors,
   so that hooks see them. Never x.
4. Forward under autocast casts as `linear` does; what is saved of x has the cast dtype.

CompAct: arXiv 2410.15352, section 3.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from ._shared import SharedInput
from ._sketch import FeatureSketch, Over, Sketch, make_sketch

# As it is at import: whoever intercepts `torch.nn.functional.linear` may call this module without meeting himself.
_linear = torch.nn.functional.linear


class Sink(Protocol):
    """Where small gradients go instead of `weight.grad`."""

    def sketch(self) -> FeatureSketch:
        """The sketch of this forward."""

    def add(self, sketch: FeatureSketch, grad: Tensor) -> None:
        """Take d^T z, [out, r], made with the sketch of its forward."""


def compact_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    rank: int,
    key: int,
    kind: str = "gaussian",
    over: Over | None = None,
    importance: Tensor | None = None,
    shared: SharedInput | None = None,
) -> Tensor:
    """`linear(x, weight, bias)` that saves a sketch of x: an exact input gradient, an unbiased weight gradient.

    The weight gradient is full-size, for any optimizer. Give every layer and every step a key of its own
    (`compact.key(seed, name, step)`), and the same one to a forward that is repeated by checkpointing.

    Args:
        x: [..., n].
        weight: [out, n].
        bias: [out] or None.
        rank: r: features of n, or tokens where the sketch is over tokens.
        key: 64 bits the sketch is made from.
        kind: "gaussian" (CompAct), "rademacher", "orthonormal", "sparse"; over tokens also "uniform", "crs",
            "wta-crs".
        over: "features" or "tokens"; by default tokens for the last three kinds and features for the others.
        importance: [...], not negative, one number a token: for crs and wta-crs, which draw tokens in proportion to
            it times |x_i|. The norms of d from an earlier step are the best.
        shared: remembers the sketch for the next layer that reads the same x with the same key, kind and rank.

    Returns:
        [..., out].

    Raises:
        RankError: a rank below 1, or above n (tokens, where it is over tokens).
        CodecError: kind, over and importance that do not go together.
        RuntimeError: from a second derivative; shapes that do not fit.
    """
    sketch = make_sketch(kind, over, x.shape[-1], rank, key)
    return _apply(x, weight, bias, sketch, None, importance, shared)


def linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, sink: Sink, shared: SharedInput | None) -> Tensor:
    """As `compact_linear`, but d^T z goes to `sink` and the weight gets no gradient from autograd."""
    return _apply(x, weight, bias, sink.sketch(), sink, None, shared)


def _apply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sketch: Sketch,
    sink: Sink | None,
    importance: Tensor | None,
    shared: SharedInput | None,
) -> Tensor:
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return _linear(x, weight, bias)  # saves no input anyway
    # Casts of x and bias are autograd's own; the weight's is made again in backward, not kept.
    cast = _autocast(x)
    flat = cast.reshape(-1, cast.shape[-1])

    def save() -> tuple[Tensor, ...]:
        return sketch.save(flat.detach(), importance)

    # Looked up by x, as every layer is given it: under autocast each layer has a cast copy of its own.
    saved = save() if shared is None else shared.saved(x, sketch, cast.dtype, save)
    # `linear` adds the bias within the product for these layouts, and after it for others; the last bit differs.
    inside = bias is not None and (cast.dim() == 2 or cast.is_contiguous())
    out: Tensor = _CompactLinear.apply(  # type: ignore[no-untyped-call]  # torch has no types for it
        flat,
        weight,
        _autocast(bias) if bias is not None and inside else None,
        _autocast_dtype(weight),
        sketch,
        sink,
        *saved,
    )
    out = out.view(*x.shape[:-1], out.shape[-1])
    return out if bias is None or inside else out + _autocast(bias)


class _CompactLinear(Function):
    """Of matrices, so that what it returns is no view: those must not be changed in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        sketch: Sketch,
        sink: Sink | None,
        *saved: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *saved)
        ctx.sketch, ctx.sink, ctx.dtype, ctx.weight_dtype = sketch, sink, dtype, weight.dtype
        ctx.by_columns = x.stride() == (1, x.shape[0])
        with torch.autocast(x.device.type, enabled=False):
            return _linear(x, weight.to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        weight, *saved = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        with torch.no_grad():
            if ctx.needs_input_grad[0]:
                w = weight.to(ctx.dtype)
                # As the derivative of `mm`: by columns where x was stored by columns.
                grad_x = w.t().mm(grad.t()).t() if ctx.by_columns else grad.mm(w)
            if ctx.needs_input_grad[1]:
                if ctx.sink is None:
                    grad_weight = ctx.sketch.weight_grad(tuple(saved), grad).to(ctx.weight_dtype)
                else:
                    ctx.sink.add(ctx.sketch, ctx.sketch.small_grad(tuple(saved), grad).to(ctx.weight_dtype))
            if ctx.needs_input_grad[2]:
                grad_bias = grad.sum(0)
        if torch.is_grad_enabled():
            results = _FirstDerivativeOnly.apply(grad, grad_x, grad_weight, grad_bias)  # type: ignore[no-untyped-call]
            grad_x, grad_weight, grad_bias = results
        return (grad_x, grad_weight, grad_bias, None, None, None, *(None for _ in saved))


class _FirstDerivativeOnly(Function):
    """Hands on the gradients of a backward with `create_graph`, and explains itself when they are derived again."""

    @staticmethod
    def forward(ctx: FunctionCtx, grad: Tensor, *results: Tensor | None) -> tuple[Tensor | None, ...]:
        return results

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> None:
        raise RuntimeError(
            "compact_linear was asked for a second derivative: it keeps a sketch of its input, from which only first "
            "ones can be made; use a plain linear layer where create_graph=True is needed"
        )


def _autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype autocast would give `linear` this tensor in."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def _autocast(tensor: Tensor) -> Tensor:
    return tensor.to(_autocast_dtype(tensor))
