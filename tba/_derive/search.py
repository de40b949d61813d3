"""Search: finds how to recompute a saved tensor, bit for bit, from tensors that other nodes saved.

`recipe` inspects the node that made a tensor and finds, for each operand, the packed object that a pack hook returned
for it: the node's own saved input, an earlier node's saved result, or what `remember` noted about another saved tensor.
An operand that no node saved is itself derived from the operands of its own node.

Guarantees:

1. No unpack hook runs before `compute`: `recipe` reads `_raw_saved_*`, which shows packed objects, and plain scalars.
2. `compute` ends. A recipe never changes and holds only packed objects that existed before it, so requests for them,
   even if they are derived too, go strictly back in time; and at most `MAX_OPERATORS` operators lie on any path,
   including those of the recipes underneath (`about`).
3. There is no cycle, and no deep recursion when the graph is freed (`nodes`). A recipe holds packed objects and no
   node; the result that a node saves itself is never derived from that node. `remember` leaves only a weak reference at
   a node. So a dropped graph is freed at once.
4. A recipe does not need the graph: its packed objects live as long as it does, even if backward has freed the node.
5. Nothing is computed from emptied memory: `compute` raises instead.

Assumptions:

1. A node computed with the tensors that it saved, and a tensor at version 0 is as its node made it. Edits without a
   trace break this (`.data`, NumPy, a tensor that no node saved edited under `no_grad`). So a recipe is a guess: its
   result is compared with the tensor, each time (`Recipe.settled`). `about` reports edits of saved operands.
2. No other thread frees this graph while `recipe` inspects it.

One difference from plain PyTorch: if a stored operand is edited in place after it was saved, asking for a tensor
derived from it raises too, even if backward runs through no node that saved the operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from .._torch import private
from .._torch.nodes import maker
from .operators import OPERATORS, RESULTS, WITHOUT_EPS, Output, signed
from .recipe import Expression, Operand, Recipe, Unpack

__all__ = ["MAX_OPERATORS", "Recipe", "recipe", "remember"]

MAX_OPERATORS: Final = 4  # beyond, recomputing costs more than reading back; no model that we have seen needs five
_MAX_MOVES: Final = 6  # views and copies on a path; `x.transpose(1, 2).reshape(...)` has three
_UNKNOWN: Final = object()  # a scalar that this torch saves under another name
_NOTE: Final = "tba_saved"  # the key in a node's metadata
_REAL: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# (packed object, whether another node than its user saved it) -> depth of its own recipe, 0 if it is kept; None if it
# must not be used.
About = Callable[[Any, bool], int | None]


def recipe(tensor: Tensor, unpack: Unpack, about: About | None = None) -> Recipe | None:
    """Find how to recompute `tensor` from objects packed for the hook `unpack`; None if there is no way.

    Call it in a pack hook with the tensor to be saved or, if that is a view, with its base. It does not use packed
    objects of other hooks (checkpointing's), because unpacking them may have effects.

    Args:
        tensor: any tensor. There is no way for leaves, subclasses, complex numbers and integers, tensors edited in
            place, unknown operators, results that their own node saves, and operands that no node saved.
        unpack: the unpack hook, compared by equality with that of each saved tensor.
        about: describes packed objects of this hook; without it each counts as kept and unedited.
    """
    if not private.derives or type(tensor) is not Tensor or tensor.dtype not in _REAL:
        return None
    node = maker(tensor)
    if node is None:
        return None
    name = _name(node)
    if name not in OPERATORS or tensor._version or tensor.layout is not torch.strided or tensor.is_neg():
        return None
    number = tensor.output_nr
    if number in RESULTS.get(name, ()):
        return None
    finder = _Finder(unpack, about)
    expression = finder.expression(node, number, 0, 0)
    if expression is None:
        return None
    names, strides = tuple(finder.names), tensor.stride()
    signature = names, expression.output, strides
    return Recipe(
        expression,
        strides,
        unpack,
        tuple(finder.sources),
        finder.depth,
        finder.amplifies,
        finder.searches,
        names,
        signature,
    )


def remember(tensor: Tensor, unpack: Unpack, packed: Callable[[], Any]) -> None:
    """Note at the node that made `tensor` that it was saved, so that recipes of other tensors may start from it.

    `packed()` returns the packed object for the hook `unpack`, or None when it is gone; it must hold it weakly. A
    tensor's last note counts. Tensors edited in place are not noted, because their node records no version.
    """
    node = None if tensor._version else maker(tensor)
    if node is not None:
        node.metadata.setdefault(_NOTE, {})[tensor.output_nr] = (unpack, packed)


class _Finder:
    """One search for operands: its sources, operators and depth."""

    def __init__(self, unpack: Unpack, about: About | None) -> None:
        self._unpack = unpack
        self._about = about
        self.sources: list[Any] = []
        self.names: list[str] = []
        self.depth = 0
        self.amplifies = self.searches = False

    def expression(self, node: Any, number: int, used: int, moves: int) -> Expression | None:
        """The expression for output `number` of `node`; None if an operand is unavailable.

        `used` operators and `moves` lie on the path from the tensor to this output.
        """
        name = _name(node)
        operator = OPERATORS.get(name)
        if operator is None:
            return None
        if name in WITHOUT_EPS and not hasattr(node, "_saved_eps"):
            operator = WITHOUT_EPS[name]
        moves += operator.moves
        used += not operator.moves
        outputs = node._input_metadata
        if used > MAX_OPERATORS or moves > _MAX_MOVES or number >= len(outputs):
            return None
        output = _output(outputs[number], number)
        if output.dtype not in _REAL:
            return None
        self.depth = max(self.depth, used)
        self.amplifies |= operator.amplifies
        self.searches |= operator.find is not None
        self.names.append(name)
        edges = node.next_functions
        if len(edges) != len(operator.operands):
            return None
        operands: list[Any] = []
        for place, (saved_as, edge) in enumerate(zip(operator.operands, edges, strict=True)):
            found: Any = None if saved_as is None else self._saved(node, saved_as, used, made_by=edge[0])
            if found is None:
                if place == operator.bias:
                    if operands[-1] is not None and (found := self._parameter(edge[0], used)) is None:
                        return None
                elif saved_as in operator.optional:  # absent, unless another hook has it
                    raw = getattr(node, f"_raw_saved_{saved_as}", None)
                    if raw is None or raw.data is not None:
                        return None
                else:
                    found = self._upstream(edge, used, moves, output.device)
                    if found is None:
                        return None
            operands.append(found)
        for saved_as in operator.extras:
            found = self._saved(node, saved_as, used)
            if found is None:
                return None
            operands.append(found)
        scalars = tuple(signed(getattr(node, f"_saved_{scalar}", _UNKNOWN)) for scalar in operator.scalars)
        if _UNKNOWN in scalars:
            return None
        return Expression(operator, tuple(operands), scalars, output)

    def _saved(self, node: Any, name: str, used: int, *, made_by: Any = None, upstream: bool = False) -> Any:
        """What `node` saved under `name`, made by another node: an `Operand`, a Python number, or None."""
        raw = getattr(node, f"_raw_saved_{name}", None)
        if raw is None or raw.data is None:
            return None
        packed = raw.data
        hook = raw.unpack_hook
        if hook is not None:
            return self._source(packed, used, upstream=upstream) if hook == self._unpack else None
        # Numbers are saved without a hook; so are tensors saved outside any hook, which may still be edited.
        is_number = made_by is None and isinstance(packed, Tensor) and not packed.dim() and packed.is_cpu
        return packed.item() if is_number and not packed._version else None

    def _parameter(self, node: Any, used: int) -> Operand | None:
        """A parameter, by the node that adds up its gradient; None if no node does.

        Its version now stands for that of then: what is made from it is compared, or checked, as all is.
        """
        parameter = getattr(node, "variable", None)
        return None if parameter is None else self._source((parameter, parameter._version), used, upstream=False)

    def _source(self, packed: Any, used: int, *, upstream: bool) -> Operand | None:
        depth = 0 if self._about is None else self._about(packed, upstream)
        if depth is None or used + depth > MAX_OPERATORS:
            return None
        self.depth = max(self.depth, used + depth)
        self.sources.append(packed)
        return Operand(packed)

    def _upstream(
        self, edge: tuple[Any, int], used: int, moves: int, device: torch.device
    ) -> Operand | Expression | None:
        """An operand that its user did not save: saved by its maker, noted by `remember`, or derived in turn."""
        node, number = edge
        if node is None:
            return None  # it requires no grad, so nothing is recorded
        outputs = node._input_metadata
        if number >= len(outputs):
            return None
        if outputs[number].device != device:
            return None
        saved_as = RESULTS.get(_name(node), {}).get(number)
        if saved_as is not None:
            found: Operand | None = self._saved(node, saved_as, used, made_by=node, upstream=True)
            if found is not None:
                return found
        note = node.metadata.get(_NOTE, {}).get(number)
        packed = note[1]() if note is not None and note[0] == self._unpack else None
        if packed is not None:
            found = self._source(packed, used, upstream=True)
            if found is not None:
                return found
        return self.expression(node, number, used, moves)


_names: dict[type, str] = {}  # by type of node: asking the node takes longer


def _name(node: Any) -> str:
    kind = type(node)
    name = _names.get(kind)
    if name is None:
        name = node.name()
        if private.is_operator(kind):
            _names[kind] = name
    return name


def _output(metadata: Any, number: int) -> Output:
    return Output(number, tuple(metadata.shape), metadata.dtype, metadata.device)
