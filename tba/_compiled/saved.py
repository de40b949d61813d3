"""Saved: what one compiled graph saves for its backward, and which of it can move.

Guarantees: what is an input of the graph (weights, buffers, batches) or memory of an output stays, and so does what has
no plain layout. What shares memory moves together, as the tensor that the others are views of.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

_aten = torch.ops.aten
# Their schemas do not say so, but the compiler makes views of them.
_VIEWS = (_aten._unsafe_view.default, _aten._reshape_alias.default)


@dataclass(frozen=True)
class Saved:
    """Saved tensors over one piece of memory.

    Attributes:
        root: makes that memory in forward, or is the only view of it that is saved.
        members: saved nodes of the forward graph, by their place among its outputs.
        chains: for each member, the views that lead to it from the root, the first first.
        nbytes: that it holds in memory, at the sizes that the graph is compiled for.
        made: the place of the root in the forward graph.
        wanted, released: the places of the first and the last use in the backward graph.
    """

    root: Node
    members: dict[int, Node]
    chains: dict[int, list[Node]]
    nbytes: int
    made: int
    wanted: int
    released: int


@dataclass(frozen=True)
class Ends:
    """What goes into a forward graph and comes out of it for others than its backward.

    Attributes:
        output_count: how many of its first outputs are not saved tensors.
        lasting: which of its inputs are there without it, as weights and buffers are; None for all.
    """

    output_count: int
    lasting: Container[int] | None


def find_saved(forward: Graph, backward: Graph, ends: Ends) -> tuple[list[Saved], int]:
    """Find what can move, in the order it is made, and the bytes of activations that cannot."""
    output_count, lasting = ends.output_count, ends.lasting
    outputs = list(forward.output_node().args[0])  # type: ignore[arg-type]
    given = enumerate(forward.find_nodes(op="placeholder"))
    lent = {node for number, node in given if lasting is not None and number not in lasting}
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    places = {node: place for place, node in enumerate(forward.nodes)}
    wanted = {node: place for place, node in enumerate(backward.nodes)}
    taken = {_memory(node) for node in _tensors(outputs[:output_count])}
    taken_roots = {_root(node) for node in _tensors(outputs[:output_count])}
    edited = min(
        (places[node] for node in forward.find_nodes(op="call_function", target=_aten.copy_.default)), default=1 << 62
    )
    groups: defaultdict[Node, dict[int, Node]] = defaultdict(dict)
    for place in range(output_count, len(outputs)):
        node = outputs[place]
        if isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor):
            groups[_root(node)][place] = node
    roots_over: defaultdict[object, set[Node]] = defaultdict(set)
    for root in groups:
        roots_over[_memory(root)].add(root)
    found, kept_bytes = [], 0
    for root, members in groups.items():
        if root.op != "call_function":
            kept_bytes += (bytes_of(root) or 0) if root in lent else 0
            continue  # an input's memory is not the graph's to move
        mover = root if len(members) > 1 else next(iter(members.values()))
        nbytes = bytes_of(root)
        stays = (
            nbytes is None
            or root in taken_roots
            or _memory(root) in taken
            or len(roots_over[_memory(root)]) > 1
            or places[mover] >= edited
            or not all(_is_plain(node) for node in (mover, *members.values()))
            or not {node.name for node in members.values()} <= inputs.keys()
        )
        chains = {} if stays else {place: _chain(mover, node) for place, node in members.items()}
        if stays or any(not _can_repeat(chain, inputs) for chain in chains.values()):
            kept_bytes += nbytes or 0
            continue
        uses = [wanted[user] for node in members.values() for user in inputs[node.name].users]
        reads = [wanted[reader] for node in members.values() for reader in readers_of(inputs[node.name])]
        assert nbytes is not None
        first = min(uses, default=1 << 62)
        found.append(Saved(mover, members, chains, nbytes, places[mover], first, max(reads, default=first)))
    return sorted(found, key=lambda each: each.made), kept_bytes


def _tensors(nodes: Iterable[Any]) -> Iterator[Node]:
    return (node for node in nodes if isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor))


def _memory(node: Node) -> object:
    """Tell memory apart, as far as the traced tensors show it."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) and value.layout is torch.strided else node


def base_of(node: Node) -> Node | None:
    """Return the node whose memory this one is a view of; None if it makes its own."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    if node.target is operator.getitem:
        source = node.args[0]
        return source if base_of(source) is not None else None
    views = isinstance(node.target, torch._ops.OpOverload) and (node.target.is_view or node.target in _VIEWS)
    return node.args[0] if views else None


def readers_of(node: Node) -> Iterator[Node]:
    """Find the nodes that read a node's memory: its users, and those of its views."""
    for user in node.users:
        if base_of(user) is None:
            yield user
        else:
            yield from readers_of(user)


def _root(node: Node) -> Node:
    while (base := base_of(node)) is not None:
        node = base
    return node


def _chain(root: Node, node: Node) -> list[Node]:
    """List the views that lead from a node to another, the first first."""
    chain: list[Node] = []
    while node is not root:
        chain.append(node)
        base = base_of(node)
        assert base is not None
        node = base
    return chain[::-1]


def _can_repeat(chain: Sequence[Node], inputs: dict[str, Node]) -> bool:
    """Whether views can be made again in backward: whatever else they are made from is there."""
    made = {*chain, *(node.all_input_nodes[0] for node in chain[:1])}
    return all(node in made or node.name in inputs for view in chain for node in view.all_input_nodes)


def _is_plain(node: Node) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_conj() or value.is_neg())
        and not node.meta.get("saved_tensor_with_no_vc_check", False)
    )


def bytes_of(node: Node) -> int | None:
    """Count the bytes that a tensor spans; None for one without elements, or whose sizes nobody knows."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    sizes, strides = [hint(size) for size in value.shape], [hint(stride) for stride in value.stride()]
    if any(size is None for size in (*sizes, *strides)) or 0 in sizes:
        return None
    spanned: int = (1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))) * value.itemsize
    return spanned


def hint(size: Any) -> Any:
    """The size that a symbolic one stands for as the graph is compiled; None where it depends on data."""
    return size if isinstance(size, int) else size.node.hint
