"""Recomputed: the memory that holds what a compiled backward computes again."""

from __future__ import annotations

import operator
from itertools import accumulate

from torch import Tensor
from torch.fx import Graph, Node

from .flops import formula_of
from .saved import base_of, bytes_of, readers_of

_FUSED = ("aten", "prims")  # whose operators the compiler fuses with what reads them, as far as it can


def recomputed_bytes(forward: Graph, backward: Graph) -> list[int]:
    """Count the bytes that are held, at each node of the backward graph; empty if nothing is computed again.

    Each result counts from where it is computed to its last reader, in the order of the graph. One that a pointwise
    operator makes, and no matrix product or the like reads, is computed within its readers and holds no memory.
    """
    made = {node.name for node in forward.nodes if node.op == "call_function"}
    places = {node: place for place, node in enumerate(backward.nodes)}
    changes = [0] * (len(places) + 1)
    for node, place in places.items():
        if node.op == "call_function" and node.name in made and _is_held(node):
            nbytes = bytes_of(node) or 0
            changes[place] += nbytes
            changes[max((places[reader] for reader in readers_of(node)), default=place) + 1] -= nbytes
    return list(accumulate(changes[:-1])) if any(changes) else []


def _is_held(node: Node) -> bool:
    """Whether what a node makes has memory of its own."""
    if base_of(node) is not None or not isinstance(node.meta.get("val"), Tensor):
        return False
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, Node) and (_is_kernel(source) or any(_is_kernel(reader) for reader in readers_of(node)))


def _is_kernel(node: Node) -> bool:
    """Whether a node is computed by itself: a matrix product, a convolution, attention, a program's own operator."""
    namespace = getattr(node.target, "namespace", "aten")
    return node.op == "call_function" and (formula_of(node) is not None or namespace not in _FUSED)
