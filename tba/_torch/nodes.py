"""Nodes: inspects autograd's graph from Python so that freeing a deep graph does not overflow the stack.

Inspecting a node (`tensor.grad_fn`, `node.next_functions`) makes a Python object for it, which torch keeps as long as
the node lives. C++ frees a chain of such nodes recursively, at least one stack frame each: beyond some 100,000 of them
the process dies of a stack overflow. PyTorch frees nodes without Python objects in a loop.

`seal` gives each such object a tuple of the next ones. A chain is then freed through Python's containers, whose
deallocation has bounded depth. A node is sealed once, at about the cost of inspecting it.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

_SEAL: Final = "tba_next"  # the key in a node's metadata


def maker(tensor: Tensor) -> Any:
    """The node that made `tensor`, sealed; None for a leaf. Use it instead of `tensor.grad_fn`."""
    node = tensor.grad_fn
    if node is not None:
        seal(node)
    return node


def seal(node: Any) -> None:
    """Let `node` and all nodes it leads to be freed without deep recursion. Cheap if those are sealed already."""
    unsealed = [node]
    while unsealed:
        node = unsealed.pop()
        metadata = node.metadata
        if _SEAL not in metadata:
            metadata[_SEAL] = edges = node.next_functions
            unsealed.extend(following for following, _ in edges if following is not None)
