"""Kinds: what class a saved tensor has, from the function that saves it and that function's arguments.

Pure rules, one for each family of functions; a wrong answer would make a gradient wrong, so each names only what it can
tell for sure and leaves the rest UNKNOWN, which is exact under every preset. Tensors are told apart by their number of
elements, since operators save views and cast copies of their arguments; where two numbers coincide the answer is the
exact one.

Not here, on purpose:

- relu saves its result, half of it zeros, and its derivative asks only which. A codec that rotates gives zeros back as
  noise, so half of them would pass a gradient on. The same tensor is the next layer's input, kept exact with it.
- leaky relu, elu, celu and selu: their derivatives jump or bend where the sign changes, and small values round to zero.
- factors that need no gradient: they may be masks, whose zeros must stay zeros.
- tanh and sigmoid save results whose derivatives, 1 - y^2 and y (1 - y), vanish where most of them are: a small error
  there is a large one in the gradient.
- products of two activations (q k^T, probabilities times v): softmax makes large errors of small ones.
- functions of functions that torch shows as one, as `multi_head_attention_forward`.

Classes: `compact.Saved`; sources in `compact._presets`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compact import Saved

from .._torch.weights import is_weight

# Class of a saved tensor, from it and the arguments of the function that saves it.
Rule = Callable[[Tensor, tuple[Any, ...], Mapping[str, Any]], Saved]
# A function under way: its rule, and its arguments.
Call = tuple[Rule, tuple[Any, ...], Mapping[str, Any]]

_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def is_float(tensor: Tensor) -> bool:
    """Whether codecs may touch it. Eight-bit floats are a codec's work already."""
    return tensor.dtype in _FLOATS


def argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    """An argument given by place or by name; None where it is left out."""
    return args[place] if len(args) > place else kwargs.get(name)


def _index(tensor: Tensor) -> Saved:
    return Saved.INDEX if tensor.dtype in _INTEGERS else Saved.UNKNOWN


def _only_index(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    return _index(tensor)


# -- products with a weight ------------------------------------------------------------------------------------------


def _factors(first: int, first_name: str, second: int, second_name: str) -> Rule:
    """The rule of a product, bilinear in two arguments: one must be a weight, then the other is LINEAR_INPUT."""

    def rule(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
        if not is_float(tensor):
            return _index(tensor)
        one, two = argument(args, kwargs, first, first_name), argument(args, kwargs, second, second_name)
        if not (isinstance(one, Tensor) and isinstance(two, Tensor)) or is_weight(one) == is_weight(two):
            return Saved.UNKNOWN
        weight, other = (one, two) if is_weight(one) else (two, one)
        # Of a frozen weight's product only the weight is saved, perhaps as a cast copy that nothing links to it.
        if not weight.requires_grad or tensor.numel() != other.numel():
            return Saved.UNKNOWN
        # Autocast's cache may hold a cast of the weight made under no_grad, unlinked too. It needs no gradient; the
        # weight is saved only if the other factor does.
        return Saved.LINEAR_INPUT if tensor.requires_grad or not other.requires_grad else Saved.UNKNOWN

    return rule


# -- norms -----------------------------------------------------------------------------------------------------------


def _norm(statistics: Callable[[Tensor, Any], int]) -> Rule:
    """The rule of a norm. `statistics`: how many means it makes, from the input and the argument after it."""

    def rule(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
        if not is_float(tensor):
            return _index(tensor)
        x = argument(args, kwargs, 0, "input")
        if not isinstance(x, Tensor):
            return Saved.UNKNOWN
        numel = x.numel()
        if tensor.numel() != numel:
            return Saved.NORM_STATISTICS
        weight = kwargs.get("weight")
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", kwargs.get("num_groups"))
        if statistics(x, shape) == numel or (isinstance(weight, Tensor) and weight.numel() == numel):
            return Saved.NORM_STATISTICS  # one element a group, or one group: input, mean and weight look alike
        return Saved.NORM_INPUT

    return rule


def _layers(x: Tensor, shape: Any) -> int:
    return x.numel() // max(math.prod(shape), 1) if isinstance(shape, (tuple, list)) else x.numel()


def _groups(x: Tensor, count: Any) -> int:
    return x.shape[0] * count if isinstance(count, int) else x.numel()


def _squared(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    """The rule, within a norm written in Python, of what is squared for its mean; elsewhere a power is UNKNOWN."""
    exponent = argument(args, kwargs, 1, "exponent")
    return Saved.NORM_INPUT if isinstance(exponent, (int, float)) and exponent == 2 else Saved.UNKNOWN


def _quotient(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    """The same of what is divided by its root. Errors of small divisors would be large."""
    return Saved.NORM_INPUT if tensor is argument(args, kwargs, 0, "input") else Saved.UNKNOWN


def other(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    """The rule of functions that have none."""
    return Saved.UNKNOWN


_PARTS_OF_NORMS = frozenset((_squared, _quotient, other))


def kind_in(tensor: Tensor, call: Call | None, norm_numel: int | None) -> Saved:
    """Class of what a function saves.

    Args:
        call: the function under way; none in a custom Function, which is taken for the whole of a norm it is in.
        norm_numel: elements of the input of the norm, written in Python, that is under way.
    """
    of_norms = call is None or call[0] in _PARTS_OF_NORMS
    if norm_numel is None:
        return Saved.UNKNOWN if call is None or of_norms else call[0](tensor, *call[1:])
    if call is not None and not of_norms and call[0] is not _product_factor:
        return call[0](tensor, *call[1:])
    if not is_float(tensor):
        return Saved.UNKNOWN
    if tensor.numel() < norm_numel:
        return Saved.NORM_STATISTICS
    return Saved.NORM_INPUT if call is None or call[0] is _product_factor else call[0](tensor, *call[1:])


# -- elementwise -----------------------------------------------------------------------------------------------------


def _activation(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    x = argument(args, kwargs, 0, "input")
    if is_float(tensor) and isinstance(x, Tensor) and tensor.numel() == x.numel():
        return Saved.ACTIVATION_INPUT
    return _index(tensor)


def _product_factor(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    """The rule of an elementwise product: a factor that is not broadcast. Broadcast ones are small, and stay exact."""
    one, two = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "other")
    if not is_float(tensor):
        return _index(tensor)
    if not (isinstance(one, Tensor) and isinstance(two, Tensor)) or not tensor.requires_grad:
        return Saved.UNKNOWN
    full = one.numel() if one.shape == two.shape else math.prod(torch.broadcast_shapes(one.shape, two.shape))
    return Saved.PRODUCT_FACTOR if tensor.numel() == full else Saved.UNKNOWN


def _dropout(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    # On a CPU the mask is a float one, 0 and 1 / (1 - p), and the only tensor saved; it needs no gradient.
    if tensor.dtype in (torch.bool, torch.uint8):
        return Saved.MASK
    drawn = not tensor.requires_grad and tensor is not argument(args, kwargs, 0, "input")
    return Saved.MASK if is_float(tensor) and drawn else _index(tensor)


def _probabilities(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    return Saved.PROBABILITIES if is_float(tensor) else _index(tensor)


# -- attention -------------------------------------------------------------------------------------------------------


def _attention(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    q, k, v = (argument(args, kwargs, place, name) for place, name in enumerate(("query", "key", "value")))
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and is_float(tensor)):
        return Saved.ATTENTION_STATISTICS
    if tensor is q or tensor is k or tensor is v:
        return Saved.ATTENTION
    # Of q in all batches and heads, one log-sum-exp each: also where q is one for all batches of k.
    rows = max(q.numel() // max(q.shape[-1], 1), k.numel() // max(math.prod(k.shape[-2:]), 1) * q.shape[-2])
    attention = {q.numel(), k.numel(), v.numel(), rows * v.shape[-1]}
    # What else is saved: a log-sum-exp, whose rows one CUDA kernel pads to multiples of 32; a mask, perhaps expanded;
    # and where no fused kernel serves, probabilities and what dropout keeps of them.
    mask, count = argument(args, kwargs, 3, "attn_mask"), max(q.shape[-2], 1)
    others = {rows, rows // count * (-(-count // 32) * 32), rows * k.shape[-2]}
    if isinstance(mask, Tensor):
        others.add(mask.numel())
    if attention & others or tensor.numel() not in attention:
        return Saved.ATTENTION_STATISTICS
    return Saved.ATTENTION


# -- the table -------------------------------------------------------------------------------------------------------

_NAMES: Mapping[Rule, tuple[str, ...]] = {
    _factors(0, "input", 1, "weight"): (
        *("linear", "conv1d", "conv2d", "conv3d"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    ),
    _factors(0, "input", 1, "other"): ("matmul", "__matmul__", "__rmatmul__"),
    _factors(0, "input", 1, "mat2"): ("mm", "bmm"),
    _factors(1, "mat1", 2, "mat2"): ("addmm", "addmm_"),
    _factors(1, "batch1", 2, "batch2"): ("baddbmm", "baddbmm_"),
    _norm(_layers): ("layer_norm", "rms_norm"),
    _norm(_groups): ("group_norm",),
    _norm(lambda x, _: x.shape[1]): ("batch_norm",),
    _norm(lambda x, _: x.shape[0] * x.shape[1]): ("instance_norm",),
    _activation: (*("gelu", "silu", "silu_", "mish", "mish_", "softplus", "hardswish", "hardswish_"),),
    _product_factor: ("mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__", "__imul__"),
    _squared: ("pow", "__pow__"),
    _quotient: ("div", "divide", "true_divide", "__truediv__"),
    _dropout: (
        *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_"),
        *("feature_dropout", "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout"),
    ),
    _attention: ("scaled_dot_product_attention",),
    _probabilities: ("softmax", "log_softmax", "cross_entropy"),
    _only_index: (
        *("embedding", "embedding_bag", "nll_loss", "gather", "index_select", "scatter", "scatter_", "scatter_add"),
        *("scatter_add_", "index_add", "index_add_", "index_copy", "take_along_dim", "__getitem__", "topk", "sort"),
        *("max_pool1d", "max_pool2d", "max_pool3d"),
    ),
}
# The places that have these names; torch shows an override the very object found there.
_PLACES = (torch, Tensor, functional, torch.special)

RULES: Mapping[Any, Rule] = {
    getattr(place, name): rule
    for rule, names in _NAMES.items()
    for name in names
    for place in _PLACES
    if hasattr(place, name)
}
