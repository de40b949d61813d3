"""Given: the inputs of a step's blocks, by the tensor objects that the blocks were called with."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Input:
    """What a block is given, and none was before: what it saves where it recomputes.

    Attributes:
        nbytes: of it.
        stays_bytes: of them, those that no plan moves: of small tensors, of slices, of weights, and of what other
            blocks are given too, which the first block of backward wants.
        small_bytes: of these, those of small tensors, which have no record.
    """

    nbytes: int = 0
    stays_bytes: int = 0
    small_bytes: int = 0


@dataclass
class _Source:
    """One storage of an input; `moves_bytes` of it go where the input moves."""

    input: Input
    moves_bytes: int

    def share(self) -> None:
        """Have it stay, as another block is given it too."""
        self.input.stays_bytes += self.moves_bytes
        self.moves_bytes = 0


class Given:
    """The tensor objects that blocks of one class have been given in a step; those of `least_bytes` may move."""

    def __init__(self, least_bytes: int = 0) -> None:
        self._least_bytes = least_bytes
        self._known: dict[int, tuple[weakref.ref[Tensor], _Source]] = {}  # by id, which may be another's once it died

    def take(self, tensors: Iterable[Tensor]) -> Input:
        """Note what a block is given. A mask or a bias that all blocks are given is in the first one's input."""
        taken = Input()
        views: dict[int, list[Tensor]] = defaultdict(list)  # of each storage that is new
        for tensor in tensors:
            if (source := self._source(tensor)) is None:
                views[tensor.untyped_storage()._cdata].append(tensor)
            else:
                source.share()
        for each in views.values():
            nbytes = min(each[0].untyped_storage().nbytes(), sum(tensor.nbytes for tensor in each))
            source = _Source(taken, nbytes if all(map(self._may_move, each)) else 0)
            taken.nbytes += nbytes
            taken.stays_bytes += nbytes - source.moves_bytes
            taken.small_bytes += nbytes if self._is_small(each[0]) else 0
            self._known |= {id(tensor): (weakref.ref(tensor), source) for tensor in each}
        return taken

    def _source(self, tensor: Tensor) -> _Source | None:
        reference, source = self._known.get(id(tensor), (None, None))
        return source if reference is not None and reference() is tensor else None

    def _may_move(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().nbytes() == tensor.nbytes >= self._least_bytes and not _is_weight(tensor)

    def _is_small(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().nbytes() < self._least_bytes and not _is_weight(tensor)


def _is_weight(tensor: Tensor) -> bool:
    return tensor.is_leaf and tensor.requires_grad
