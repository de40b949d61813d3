"""Placement: puts the operators that move a tensor into the graphs of one forward and its backward.

In forward all stand at the end, in backward at the beginning, where a graph without them has outputs and inputs: so the
compiler makes the same kernels. Where they run is decided when the kernels are known (`order`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from .carrier import Carrier
from .choice import Windows
from .operators import AHEAD, BACK, DONE, OUT, Item, token_like
from .saved import Saved

_COPY = torch.ops.aten.copy_.default


def place(
    forward: Graph, backward: Graph, moved: Sequence[Saved], carrier: Carrier, windows: Windows, beside_bytes: int
) -> list[Item]:
    """Have tensors move, within windows; `beside_bytes`: that the graph saves and keeps.

    Returns what the operators work on.
    """
    output = forward.output_node()
    outputs = list(output.args[0])  # type: ignore[arg-type]
    before = next((node for node in forward.find_nodes(op="call_function", target=_COPY)), output)
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    first = next(node for node in backward.nodes if node.op != "placeholder")
    items: list[Item] = []
    gone: set[int] = set()
    for saved in moved:
        value = saved.root.meta["val"]
        item = Item(
            weakref.ref(carrier),
            tuple(value.shape),
            value.stride(),
            value.dtype,
            value.device,
            saved.nbytes,
            windows,
            beside_bytes=0 if items else beside_bytes,
        )
        with forward.inserting_before(before):
            token = _call(forward, OUT, saved.root, item.number)
            outs = _call(forward, DONE, token, saved.root, item.number)
        home, *others = saved.members
        outputs[home] = outs
        gone.update(others)
        token = inputs[saved.members[home].name]
        used = {member: inputs[saved.members[member].name] for member in saved.members}
        with backward.inserting_before(first):
            begun = _call(backward, AHEAD, token, item.number)
            back = _call(backward, BACK, token, begun, item.number)
            back.meta["val"] = value
            for member, chain in saved.chains.items():
                result = _repeat(chain, back, backward, inputs | {saved.root.name: back})
                used[member].replace_all_uses_with(
                    result, delete_user_cb=lambda node, ours=(begun, back): node not in ours
                )
        token.meta = {"val": begun.meta["val"]}
        for member in others:
            backward.erase_node(used[member])
        items.append(item)
    output.args = (tuple(each for number, each in enumerate(outputs) if number not in gone),)
    return items


def _repeat(chain: Sequence[Node], root: Node, graph: Graph, made: dict[str, Node]) -> Node:
    """Make views again in another graph, which has made what they are made from; returns the last."""
    result = root
    for view in chain:
        result = made[view.name] = graph.node_copy(view, lambda node: made[node.name])
    return result


def _call(graph: Graph, operator: torch._ops.OpOverload, *args: Node | int) -> Node:
    node = graph.call_function(operator, args)
    source = args[0]
    assert isinstance(source, Node)
    with source.meta["val"].fake_mode:
        node.meta["val"] = token_like()
    return node
