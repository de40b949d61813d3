"""Derive: a saved tensor made again, bit for bit, from what other nodes saved.

`recipe` looks at the node that made a tensor and finds, for each operand, the packed object that some node's pack hook
returned for it: the node's own saved input, an earlier node's saved result, or what `remember` noted of another saved
tensor. Where an operand was not saved by anybody, it is itself derived from its own node's operands.

Guarantees:

1. No unpack hook runs before `compute`: `recipe` reads `_raw_saved_*`, which shows packed objects, and plain scalars.
2. `compute` ends. A recipe never changes and holds only packed objects that existed before it, so asking for them, even
   where they are recipes too, goes strictly back in time; and at most `MAX_OPERATORS` operators lie on any path,
   those of the recipes underneath included (`about`).
3. No cycle, and no deep recursion when the graph is freed (`nodes`). A recipe holds packed objects and no node; a node
   that saves its own result is never asked to derive it. What `remember` leaves at a node is a weak reference. So a
   graph that is dropped is freed at once.
4. It does not need the graph: the packed objects live as long as the recipe, also when backward has freed the node.
5. No emptied memory is computed with: `compute` raises instead.

Assumptions:

1. What a node saved is what it computed with, and a tensor at version 0 is what its node made. Edits that leave no
   trace break this (`.data`, NumPy, a tensor that nobody saved edited under `no_grad`). So a recipe is a guess: compare
   what it gives with the tensor, each time (`Recipe.settled`). Of edited operands that somebody saved, `about` tells.
2. No other thread frees this graph while `recipe` looks at it.

A difference from plain PyTorch: a stored operand edited in place after it was saved raises for what is derived from it
too, also where backward runs through nobody who saved that operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from .._torch import private
from .._torch.nodes import maker
from .operators import OPERATORS, RESULTS, Output, signed
from .recipe import Operand, Recipe, Step, Unpack

__all__ = ["MAX_OPERATORS", "Recipe", "recipe", "remember"]

MAX_OPERATORS: Final = 4  # beyond, making it again costs more than bringing it back; no model seen needs five
_MAX_MOVES: Final = 6  # views and copies on a path; `x.transpose(1, 2).reshape(...)` has three
_UNKNOWN: Final = object()  # what a torch that has renamed something saves under the name it had
_NOTE: Final = "tba_saved"  # the key in a node's metadata
_REAL: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# (packed object, whether another node than its user saved it) -> depth of the recipe it stands for, 0 if it is kept;
# None if it must not be used.
About = Callable[[Any, bool], int | None]


def recipe(tensor: Tensor, unpack: Unpack, about: About | None = None) -> Recipe | None:
    """How to make `tensor` again from what was packed for the hook `unpack`, or None.

    To be called in a pack hook with the tensor to be saved or, if that is a view, with its base. Only packed objects of
    this very hook are used: another's (checkpointing's) may have effects of their own.

    Args:
        tensor: any tensor; None is the answer for leaves, subclasses, complex and integer numbers, tensors edited in
            place, unknown operators, results that their own node saves, and operands nobody saved.
        unpack: the unpack hook, compared by equality with that of each saved tensor.
        about: what is known of packed objects of this hook; without it each is kept, unedited and there to stay.
    """
    if not private.shows_packed or type(tensor) is not Tensor or tensor.dtype not in _REAL:
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
    step = finder.step(node, number, MAX_OPERATORS, _MAX_MOVES)
    if step is None:
        return None
    return Recipe(
        step,
        tensor.stride(),
        unpack,
        tuple(finder.sources),
        finder.depth,
        finder.amplifies,
        signature=(*finder.names, step.output),
    )


def remember(tensor: Tensor, unpack: Unpack, packed: Callable[[], Any]) -> None:
    """Note at the node that made `tensor` that it was saved, for recipes of what other nodes make of it.

    `packed()` gives the packed object for the hook `unpack`, or None when it is gone; it must hold it weakly. The last
    note of a tensor counts. Tensors edited in place are not noted: their node does not tell which version it means.
    """
    node = None if tensor._version else maker(tensor)
    if node is not None:
        node.metadata.setdefault(_NOTE, {})[tensor.output_nr] = (unpack, packed)


class _Finder:
    """One search for operands, and what it met on the way."""

    def __init__(self, unpack: Unpack, about: About | None) -> None:
        self._unpack = unpack
        self._about = about
        self.sources: list[Any] = []
        self.names: list[str] = []
        self.depth = 0
        self.amplifies = False

    def step(self, node: Any, number: int, operators_left: int, moves_left: int) -> Step | None:
        """`node`'s output `number` from its operands; None if one of them cannot be had."""
        name = _name(node)
        operator = OPERATORS.get(name)
        if operator is None:
            return None
        if operator.moves:
            moves_left -= 1
        else:
            operators_left -= 1
        outputs = node._input_metadata
        if min(operators_left, moves_left) < 0 or number >= len(outputs):
            return None
        output = _output(outputs[number], number)
        if output.dtype not in _REAL:
            return None
        used = MAX_OPERATORS - operators_left
        self.depth = max(self.depth, used)
        self.amplifies |= operator.amplifies
        self.names.append(name)
        edges = node.next_functions
        if len(edges) != len(operator.operands):
            return None
        operands: list[Any] = []
        for saved_as, edge in zip(operator.operands, edges, strict=True):
            found: Any = None if saved_as is None else self._saved(node, saved_as, used, maker=edge[0])
            if found is None:
                if saved_as in operator.optional:  # saved if it was there, so it was not, or another hook has it
                    raw = getattr(node, f"_raw_saved_{saved_as}", None)
                    if raw is None or raw.data is not None:
                        return None
                else:
                    found = self._upstream(edge, operators_left, moves_left, output.device)
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
        return Step(operator, tuple(operands), scalars, output)

    def _saved(self, node: Any, name: str, used: int, *, maker: Any = None, upstream: bool = False) -> Any:
        """What `node` saved under `name`, made by `maker`: an `Operand`, a Python number, or None."""
        raw = getattr(node, f"_raw_saved_{name}", None)
        if raw is None or raw.data is None:
            return None
        packed = raw.data
        hook = raw.unpack_hook
        if hook is not None:
            return self._source(packed, used, upstream=upstream) if hook == self._unpack else None
        # Numbers come without a hook; so do tensors saved outside of any hook, which someone may still edit.
        if maker is None and isinstance(packed, Tensor) and not packed.dim() and packed.is_cpu and not packed._version:
            return packed.item()
        return None

    def _source(self, packed: Any, used: int, *, upstream: bool) -> Operand | None:
        depth = 0 if self._about is None else self._about(packed, upstream)
        if depth is None or used + depth > MAX_OPERATORS:
            return None
        self.depth = max(self.depth, used + depth)
        self.sources.append(packed)
        return Operand(packed)

    def _upstream(
        self, edge: tuple[Any, int], operators_left: int, moves_left: int, device: torch.device
    ) -> Operand | Step | None:
        """An operand that its user did not save: kept by its maker, noted by `remember`, or derived in its turn."""
        node, number = edge
        if node is None:
            return None  # requires no grad: nothing tells what it was
        outputs = node._input_metadata
        if number >= len(outputs):
            return None
        if outputs[number].device != device:
            return None
        used = MAX_OPERATORS - operators_left
        saved_as = RESULTS.get(_name(node), {}).get(number)
        if saved_as is not None:
            found: Operand | None = self._saved(node, saved_as, used, maker=node, upstream=True)
            if found is not None:
                return found
        note = node.metadata.get(_NOTE, {}).get(number)
        packed = note[1]() if note is not None and note[0] == self._unpack else None
        if packed is not None:
            found = self._source(packed, used, upstream=True)
            if found is not None:
                return found
        return self.step(node, number, operators_left, moves_left)


_names: dict[type, str] = {}  # per type of node: asking the node takes longer


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
