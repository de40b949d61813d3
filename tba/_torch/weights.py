"""Weights: recognizes parameters and buffers in every form in which autograd saves them.

A weight stays where it is: it is in memory anyway, so moving it frees nothing. Without a model, three forms are
recognized: an `nn.Parameter`; a view whose `_base` is one (`W.t()`, frozen or not, FSDP2's gathered ones); and a chain
of view and cast nodes that ends in the AccumulateGrad of one (autocast's cast copies). With a model, so is every view
of its parameters' and buffers' storages, by a mark on the storage object.

Casts that autograd does not link to a parameter (a frozen weight under autocast, casts inside compiled code) are not
recognized and count as activations.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .nodes import maker
from .private import innermost, is_operator, is_wrapper

# The engine's attribute of an untyped storage: WEIGHT, or the storage's records. A storage object lives exactly as long
# as its memory, so its mark cannot be mistaken for that of another tensor at a reused address.
MARK: Final = "_tba_mark"
WEIGHT: Final = object()

_COMMON: Final = (nn.Parameter, Tensor)  # nearly all weights: no wrapper subclass, not lazy

_MAX_CHAIN = 8  # no chain of views and casts of a weight that we have seen is longer than four
_VIEWS_AND_CASTS: Final = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "AsStrided"),
        *("Select", "Slice", "Split", "SplitWithSizes", "UnsafeSplit", "Unbind", "Narrow", "Diagonal", "Alias"),
        *("Squeeze", "Unsqueeze", "Unfold", "Detach", "ToCopy", "Conj", "ViewAsReal", "ViewAsComplex", "Swapdims"),
    )
    for number in range(6)
)
_passes: dict[type, bool] = {}  # by type of node, so that names are compared only once


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is an `nn.Parameter`, or of a class derived from it."""
    kind = type(tensor)
    # `isinstance` calls Python code of Parameter's metaclass, which takes half as long as the whole hook.
    return kind is nn.Parameter or (kind is not Tensor and isinstance(tensor, nn.Parameter))


def leads_to_parameter(node: Any) -> bool:
    """Whether `node` begins a chain of views and casts that ends in the AccumulateGrad of an `nn.Parameter`."""
    for _ in range(_MAX_CHAIN):
        if node is None:
            return False
        kind = type(node)
        passes = _passes.get(kind)
        if passes is None:
            passes = node.name() in _VIEWS_AND_CASTS
            if is_operator(kind):
                _passes[kind] = passes
        if not passes:
            variable = getattr(node, "variable", None)  # what an AccumulateGrad is for
            return variable is not None and is_parameter(variable)
        node = node.next_functions[0][0]
    return False


def is_weight(tensor: Any) -> bool:
    """Whether a tensor is a parameter, or a view or cast of one that autograd or a mark on its storage reveals."""
    if isinstance(tensor, nn.Parameter):
        return True
    if type(tensor) is not Tensor:
        return is_wrapper(tensor) and _comes_from_parameter(tensor)
    if _comes_from_parameter(tensor):
        return True
    try:
        return getattr(tensor.untyped_storage(), MARK, None) is WEIGHT
    except (RuntimeError, NotImplementedError):  # functorch wrappers have no storage
        return False


def _comes_from_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor._base, nn.Parameter) or leads_to_parameter(maker(tensor))


def mark_weights(model: nn.Module) -> None:
    """Mark the storages of the model's parameters and buffers. Repeated every step, because storages are replaced.

    By a walk of its own: `parameters()` and `buffers()` take some ten calls a module.
    """
    modules, met = [model], {id(model)}
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or (not (common := type(tensor) in _COMMON) and is_lazy(tensor)):  # it has no memory yet
                continue
            for inner in (tensor,) if common else innermost(tensor):
                if type(inner.data) is Tensor and inner.layout is torch.strided and inner.device.type != "meta":
                    setattr(inner.untyped_storage(), MARK, WEIGHT)
        for child in module._modules.values():
            if child is not None and id(child) not in met:
                met.add(id(child))
                modules.append(child)
