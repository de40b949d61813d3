"""Classes of saved tensors (`compact.Saved`), derived from the function that saves one and that function's arguments.

There is one pure rule per family of functions. A wrong class would make a gradient wrong, so a rule answers only if it
is certain; the rest is UNKNOWN, which is exact under every preset. Operators save views and cast copies of their
arguments, so tensors are recognized by their number of elements; if two numbers coincide, an exact class wins.

Deliberately without a class:

- results of relu: half are zeros, and the derivative asks only which. A codec that rotates would return zeros as noise,
  and half of them would pass a gradient on. The next layer's input is this tensor, and stays exact with it.
- inputs of leaky relu, elu, celu, selu: their derivatives jump or bend where the sign changes, and small values round
  to 0.
- factors that need no gradient: they may be masks, whose zeros must stay zeros.
- results of tanh and sigmoid: their derivatives, 1 - y^2 and y (1 - y), vanish where most results are, so a small error
  of the result is a large one of the gradient.
- factors of products of two activations (q k^T, probabilities times v): softmax turns small errors into large ones.
- tensors saved within functions that torch shows as one call, such as `multi_head_attention_forward`.

`compact._presets` names the sources.
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

# (saved tensor, args, kwargs of the function that saves it) -> class.
Rule = Callable[[Tensor, tuple[Any, ...], Mapping[str, Any]], Saved]
# A running function: its rule, args and kwargs.
Call = tuple[Rule, tuple[Any, ...], Mapping[str, Any]]

_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def is_float(tensor: Tensor) -> bool:
    """Whether lossy codecs may apply. Not to 8-bit floats: some codec has made them."""
    return tensor.dtype in _FLOATS


def argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    """An argument given by position or by name; None if left out."""
    return args[place] if len(args) > place else kwargs.get(name)


# -- products with a weight ------------------------------------------------------------------------------------------


def _factors(first: int, first_name: str, second: int, second_name: str) -> Rule:
    """Make the rule of a product, bilinear in two arguments: if one is a weight, the other is LINEAR_INPUT."""

    def rule(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
        one, two = argument(args, kwargs, first, first_name), argument(args, kwargs, second, second_name)
        if not (isinstance(one, Tensor) and isinstance(two, Tensor)) or is_weight(one) == is_weight(two):
            return Saved.UNKNOWN
        weight, other = (one, two) if is_weight(one) else (two, one)
        # A product with a frozen weight saves only the weight, perhaps as a cast copy that is not linked to it.
        if not weight.requires_grad or tensor.numel() != other.numel():
            return Saved.UNKNOWN
        # Autocast's cache may hold another unlinked cast of the weight, made under no_grad. It needs no gradient, and
        # a weight is saved only if the other factor needs one.
        return Saved.LINEAR_INPUT if tensor.requires_grad or not other.requires_grad else Saved.UNKNOWN

    return rule


# -- norms -----------------------------------------------------------------------------------------------------------


def _norm(statistics: Callable[[Tensor, Any], int]) -> Rule:
    """Make the rule of a norm. `statistics` counts its means, given the input and the argument after it."""

    def rule(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
        x = argument(args, kwargs, 0, "input")
        if not isinstance(x, Tensor):
            return Saved.UNKNOWN
        numel = x.numel()
        if tensor.numel() != numel:
            return Saved.NORM_STATISTICS
        weight = kwargs.get("weight")
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", kwargs.get("num_groups"))
        if statistics(x, shape) == numel or (isinstance(weight, Tensor) and weight.numel() == numel):
            return Saved.NORM_STATISTICS  # one element per group, or one group: input, mean and weight look alike
        return Saved.NORM_INPUT

    return rule


def _layers(x: Tensor, shape: Any) -> int:
    return x.numel() // max(math.prod(shape), 1) if isinstance(shape, (tuple, list)) else x.numel()


def _groups(x: Tensor, count: Any) -> int:
    return x.shape[0] * count if isinstance(count, int) else x.numel()


def _squared(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    """Rule of powers within a norm written in Python: it squares its input for a mean. Elsewhere they are UNKNOWN."""
    exponent = argument(args, kwargs, 1, "exponent")
    return Saved.NORM_INPUT if isinstance(exponent, (int, float)) and exponent == 2 else Saved.UNKNOWN


def _quotient(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    """Rule of quotients within such a norm: the dividend is its input. Errors of small divisors would be large."""
    return Saved.NORM_INPUT if tensor is argument(args, kwargs, 0, "input") else Saved.UNKNOWN


def other(*_: Any) -> Saved:
    """Rule of functions that have none of their own."""
    return Saved.UNKNOWN


_PARTS_OF_NORMS = frozenset((_squared, _quotient, other))


def kind_in(tensor: Tensor, call: Call | None, norm_numel: int | None) -> Saved:
    """The class of a tensor that is being saved. Integers are INDEX, whatever saves them.

    Args:
        tensor: being saved.
        call: the running function; None if none runs, and in a custom Function, which counts as the whole of the norm
            around it.
        norm_numel: elements of the input of the running norm, if that is written in Python.
    """
    rule = None if call is None else call[0]
    if not is_float(tensor) and rule not in (_dropout, _attention):  # these save masks and a random state
        return Saved.INDEX if tensor.dtype in INTEGERS else Saved.UNKNOWN
    if norm_numel is None:
        return Saved.UNKNOWN if call is None or rule in _PARTS_OF_NORMS else call[0](tensor, *call[1:])
    if call is None or rule in _PARTS_OF_NORMS or rule is _product_factor:
        if tensor.numel() < norm_numel:
            return Saved.NORM_STATISTICS
        if call is None or rule is _product_factor:
            return Saved.NORM_INPUT
    return call[0](tensor, *call[1:])


# -- elementwise -----------------------------------------------------------------------------------------------------


def _activation(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    x = argument(args, kwargs, 0, "input")
    return Saved.ACTIVATION_INPUT if isinstance(x, Tensor) and tensor.numel() == x.numel() else Saved.UNKNOWN


def _product_factor(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    """Rule of elementwise products: factors that are not broadcast. Broadcast ones are small and stay exact."""
    one, two = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "other")
    if not (isinstance(one, Tensor) and isinstance(two, Tensor)) or not tensor.requires_grad:
        return Saved.UNKNOWN
    if one.is_nested or two.is_nested:  # no sizes to broadcast
        return Saved.PRODUCT_FACTOR if tensor.numel() == one.numel() == two.numel() else Saved.UNKNOWN
    full = one.numel() if one.shape == two.shape else math.prod(torch.broadcast_shapes(one.shape, two.shape))
    return Saved.PRODUCT_FACTOR if tensor.numel() == full else Saved.UNKNOWN


def _dropout(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    # On a CPU the mask holds the floats 0 and 1 / (1 - p), needs no gradient, and is the only tensor saved.
    if tensor.dtype in (torch.bool, torch.uint8):
        return Saved.MASK
    drawn = not tensor.requires_grad and tensor is not argument(args, kwargs, 0, "input")
    return Saved.MASK if is_float(tensor) and drawn else Saved.UNKNOWN


def _probabilities(*_: Any) -> Saved:
    return Saved.PROBABILITIES


# -- attention -------------------------------------------------------------------------------------------------------


def _attention(tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Saved:
    q, k, v = (argument(args, kwargs, place, name) for place, name in enumerate(("query", "key", "value")))
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and is_float(tensor)):
        return Saved.ATTENTION_STATISTICS
    if q.is_nested:  # its rows are of no one length, by which to tell what is saved
        return Saved.ATTENTION_STATISTICS
    if tensor is q or tensor is k or tensor is v:
        return Saved.ATTENTION
    # Rows of q in all batches and heads, each with one log-sum-exp; all batches of k may share q.
    rows = max(q.numel() // max(q.shape[-1], 1), k.numel() // max(math.prod(k.shape[-2:]), 1) * q.shape[-2])
    attention = {q.numel(), k.numel(), v.numel(), rows * v.shape[-1]}
    # Also saved: the log-sum-exp, whose rows one CUDA kernel pads to multiples of 32; a mask, perhaps expanded; and,
    # without a fused kernel, probabilities before and after dropout.
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
}
# Places to look up these names: torch passes the objects found there to `__torch_function__`.
_PLACES = (torch, Tensor, functional, torch.special)

RULES: Mapping[Any, Rule] = {
    getattr(place, name): rule
    for rule, names in _NAMES.items()
    for name in names
    for place in _PLACES
    if hasattr(place, name)
}
