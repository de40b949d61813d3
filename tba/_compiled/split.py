"""Split: one way to split a traced graph into forward and backward, and what it saves and computes.

PyTorch's min-cut partition makes each: the smaller its `activation_memory_budget`, the more backward computes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from .saved import Saved, find_saved, hint

_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")  # namespaces of operators

# PyTorch has no formulas for the attention of a CPU, which computes as much as that of a GPU.
_aten = torch.ops.aten
_LIKE: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to split a graph.

    Attributes:
        forward, backward: the modules.
        share: PyTorch's `activation_memory_budget` for it.
        saved: what can move, in the order it is made.
        kept_bytes: of the saved tensors that cannot.
        forward_flops, backward_flops: floating-point operations of matrix products, convolutions and attention.
        communicates: ranks exchange data in forward.
    """

    forward: Any
    backward: Any
    share: float
    saved: Sequence[Saved]
    kept_bytes: int
    forward_flops: int
    backward_flops: int
    communicates: bool = False

    @staticmethod
    def of(modules: tuple[Any, Any], share: float, output_count: int, least_bytes: int, *, from_hosts: bool) -> Split:
        """Look at a pair of modules.

        Args:
            output_count: how many outputs of the forward graph are not saved tensors.
            least_bytes: smaller tensors stay.
            from_hosts: whether what is on a host moves.
        """
        forward, backward = modules
        found, kept_bytes = find_saved(forward.graph, backward.graph, output_count)
        kept_bytes += sum(each.nbytes for each in found if each.nbytes < least_bytes)
        saved = [each for each in found if each.nbytes >= least_bytes]
        if not from_hosts:
            saved = [each for each in saved if each.root.meta["val"].device.type != "cpu"]
        return Split(
            forward=forward,
            backward=backward,
            share=share,
            saved=saved,
            kept_bytes=kept_bytes,
            forward_flops=flops_of(forward.graph),
            backward_flops=flops_of(backward.graph),
            communicates=_communicates(forward),
        )

    @property
    def saved_bytes(self) -> int:
        """What the graph saves, without its inputs and outputs."""
        return self.kept_bytes + sum(each.nbytes for each in self.saved)


def _communicates(module: Any) -> bool:
    """Whether ranks exchange data in a module's graph, or in one within it."""
    graphs = (each.graph for each in module.modules() if hasattr(each, "graph"))
    return any(getattr(node.target, "namespace", "") in _COLLECTIVES for graph in graphs for node in graph.nodes)


def flops_of(graph: Graph) -> int:
    """Count the floating-point operations of a graph by PyTorch's own formulas, which have none for pointwise ones."""
    total = 0
    for node in graph.nodes:
        operator = getattr(node.target, "overloadpacket", None)
        formula = flop_registry.get(_LIKE.get(operator, operator))
        if formula is None:
            continue
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
