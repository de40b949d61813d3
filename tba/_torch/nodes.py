"""Nodes: looking at autograd's graph from Python without making its end dangerous.

Looking at a node (`tensor.grad_fn`, `node.next_functions`) makes a Python object of it, which torch keeps as long as
the node lives. A chain of such nodes is freed by recursion in C++, a stack frame or more for each: past some 100,000 of
them the process dies of a stack overflow. PyTorch alone frees nodes that nobody has looked at in a loop.

`seal` gives each such object a tuple of the next ones. A chain is then freed through Python's containers, whose
deallocation is bounded in depth however long the chain is. A node is sealed once, so the cost of it is that of looking.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

_SEAL: Final = "tba_next"  # the key in a node's metadata


def maker(tensor: Tensor) -> Any:
    """The node that made `tensor`, sealed; None for a leaf. For use wherever `tensor.grad_fn` would be."""
    node = tensor.grad_fn
    if node is not None:
        seal(node)
    return node


def seal(node: Any) -> None:
    """Have `node` and all that it leads to freed without deep recursion. Cheap where it leads to sealed ones."""
    unsealed = [node]
    while unsealed:
        node = unsealed.pop()
        metadata = node.metadata
        if _SEAL not in metadata:
            metadata[_SEAL] = edges = node.next_functions
            unsealed.extend(following for following, _ in edges if following is not None)
