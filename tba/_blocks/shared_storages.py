"""Shared storages: those that a block saves first and something outside of it saves again, so that both keep them.

    block 0:  y = relu(x + ...)    saves y, third in the block            Place(0, 2)
    block 1:  y @ weight           saves y again, its first argument      Where(stretch 3, position 0)

If block 0 recomputes, it saves nothing, and y is met in block 1 first: its bytes stay whatever becomes of block 0. So
each shared storage has a place outside of all blocks, Place(OUTSIDE, -1) here, by which plans know it. A planned step
finds that from Place(0, 2), if block 0 saves y, and else from where block 1 does.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, strided

from .._plan.facts import OUTSIDE, Place
from .._torch.modes import quiet
from .._torch.private import tree_leaves


class Where(NamedTuple):
    """Where a storage is at hand: a stretch of forward, in a block or between two, and its position there."""

    stretch: int
    position: int


class AtHand:
    """Storages of a block's arguments or results, which what runs next is likely to save."""

    def __init__(self, value: Any = None) -> None:
        with quiet():
            tensors = filter(has_storage, tree_leaves(value))
            # By id of the storage, which another may have once the tensor has died.
            self._known = {id(leaf.untyped_storage()): (place, weakref.ref(leaf)) for place, leaf in enumerate(tensors)}

    def where(self, stretch: int, root: Tensor | None) -> Where | None:
        """Return where a saved tensor is at hand in this stretch of forward; None if it is not."""
        found = self._known.get(id(root.untyped_storage())) if root is not None and self._known else None
        return None if found is None or found[1]() is None else Where(stretch, found[0])


class SharedStorages:
    """The shared storages of one kind of step, learned in the step that is watched.

    Attributes:
        outside: the place of each outside of all blocks, by that in the block which saves it first.
    """

    def __init__(self) -> None:
        self.outside: dict[Place, Place] = {}
        self._records: set[int] = set()
        self._again: dict[Where, int] = {}
        self._first: dict[Where, Place] = {}

    def again(self, number: int, where: Where | None) -> None:
        """Note that what a block has saved as the record `number` is saved outside of it, and where it is at hand."""
        self._records.add(number)
        if where is not None:
            self._again[where] = number

    def settle(self, places: Mapping[int, Place]) -> None:
        """Give each its place outside, now that the step is over: `places` in the blocks, by record number."""
        shared = [place for number, place in places.items() if number in self._records]
        self.outside = {first: Place(OUTSIDE, -1 - number) for number, first in enumerate(shared)}
        self._first = {where: places[number] for where, number in self._again.items()}

    def first(self, where: Where | None) -> Place | None:
        """Return the place in a block of what was saved again there; None if nothing was."""
        return self._first.get(where) if where is not None else None


def has_storage(value: Any) -> bool:
    """Whether a value is a plain tensor over a storage."""
    return type(value) is Tensor and value.layout is strided
