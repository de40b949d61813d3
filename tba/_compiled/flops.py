"""Flops: the floating-point operations of a traced graph, by PyTorch's own formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from .saved import hint

# PyTorch has no formulas for the attention of a CPU, which computes as much as that of a GPU.
_aten = torch.ops.aten
_LIKE: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


def formula_of(node: Node) -> Callable[..., int] | None:
    """Find the formula of a matrix product, a convolution or attention; None for all other operators."""
    operator = getattr(node.target, "overloadpacket", None)
    found: Callable[..., int] | None = flop_registry.get(_LIKE.get(operator, operator))
    return found


def flops_of(graph: Graph) -> int:
    """Count the floating-point operations of a graph, without those of pointwise operators."""
    total = 0
    for node in graph.nodes:
        formula = formula_of(node)
        if formula is not None:
            args, kwargs = map_arg((node.args, node.kwargs), _value)
            total += formula(*args, **kwargs, out_val=_value(node))
    return total


def _value(node: Node) -> Any:
    """Return a node's value as `_shaped` gives it."""
    return _shaped(node.meta.get("val"))


def _shaped(value: Any) -> Any:
    """Give a tensor without data in place of each one, with the sizes that the graph is compiled for."""
    if isinstance(value, tuple | list):
        return [_shaped(each) for each in value]
    if isinstance(value, Tensor):
        return torch.empty([hint(size) or 0 for size in value.shape], dtype=value.dtype, device="meta")
    return hint(value) or 0 if isinstance(value, torch.SymInt) else value
