"""Sighting: what a tensor that autograd saves is: a weight, too small, of an odd kind, or worth a closer look.

The only recogniser: the hooks, steps that are followed, and the forecast's fake steps ask it alike.
"""

from __future__ import annotations

import enum
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn

from io_backends import interrupts

from .._device.kinds import is_streamed
from .._plan.policy import range_to_store
from .._torch import weights
from .._torch.weights import MARK, is_parameter, leads_to_parameter

# A slice of a storage that is worth moving stays if it is this many times smaller than such a storage has to be.
_SLICES: Final = 16

# Freeing a graph of some 100,000 nodes with Python objects overflows the stack; see `Chains`.
_LOOKS_PER_STEP: Final = 1024
_LOOKS_PER_KIND: Final = 64
_MAX_KINDS: Final = 4096


class Stays(enum.Enum):
    """Kind of a tensor that has no record."""

    WEIGHT = enum.auto()  # a parameter, a buffer of the model's, or a view or cast of one
    SMALL = enum.auto()  # its storage is smaller than the settings ask for
    ODD = enum.auto()  # a subclass, sparse, nested, within a transformation, on a device without streams


# By names of their own, as the states of a record.
WEIGHT, SMALL, ODD = Stays


class Sizes(NamedTuple):
    """Bytes of the smallest slice, and of the smallest storage, that may have a record."""

    slice_bytes: int
    storage_bytes: int

    @staticmethod
    def of(min_tensor_bytes: int) -> Sizes:
        return Sizes(min_tensor_bytes // _SLICES, min_tensor_bytes)


class Sighting(NamedTuple):
    """A plain tensor over a storage that is large enough.

    Attributes:
        nbytes: of the tensor's elements.
        mark: what the engine has set on the storage: its records, if it has any.
        cast: views and casts alone lead to it from a parameter, so that it is a weight, with memory of its own.
    """

    storage: UntypedStorage
    storage_bytes: int
    nbytes: int
    mark: Any
    cast: bool

    def range_to_move(self, begin: int, end: int, sizes: Sizes) -> tuple[int, int] | None:
        """Return the range of the storage that moves for a tensor that spans `[begin, end)`; None for a small slice."""
        if min(self.nbytes, end - begin) >= self.storage_bytes:
            return begin, end
        return None if end - begin < sizes.slice_bytes else range_to_store(begin, end, self.storage_bytes)


class Chains:
    """Finds casts of weights among saved tensors by `leads_to_parameter`, and looks at few nodes to do so.

    A node that Python has looked at keeps a Python object until it is freed, and PyTorch frees a chain of such nodes
    recursively (`nodes`): a graph of some 100,000 of them overflows the stack. To seal them all would take as long as
    the hooks. So tensors of one dtype and shape are looked at until `_LOOKS_PER_KIND` of them have turned out to be
    activations and none a weight, and at most `_LOOKS_PER_STEP` activations are looked at in a step. Beyond that a cast
    of a weight counts as an activation, which costs its transfer and changes no gradient.
    """

    def __init__(self) -> None:
        self._misses: dict[tuple[torch.dtype, tuple[int, ...]], int] = {}  # -1 once one was a weight
        self._left = _LOOKS_PER_STEP

    def end_step(self) -> None:
        """End a training step: the next one has a graph of its own."""
        self._left = _LOOKS_PER_STEP

    def lead_to_parameter(self, tensor: Tensor) -> bool:
        """Whether `tensor` is made from an `nn.Parameter` by views and casts alone; False if no more looks are left."""
        if tensor.is_leaf:
            return False
        kind = tensor.dtype, tensor.shape
        misses = self._misses.get(kind, 0)
        if misses >= _LOOKS_PER_KIND or not self._left:
            return False
        if leads_to_parameter(tensor.grad_fn):
            self._misses[kind] = -1
            return True
        self._left -= 1
        if misses >= 0:
            if len(self._misses) >= _MAX_KINDS:
                self._misses.clear()
            self._misses[kind] = misses + 1
        return False


def recognise(
    tensor: Tensor, sizes: Sizes, chains: Chains, *, casts: bool = True, plain: type[Tensor] = Tensor
) -> Stays | Sighting:
    """Tell what a tensor that autograd saves is, from the tensor and its storage alone.

    Args:
        tensor: of any kind.
        sizes: of what may have a record.
        chains: finds casts of weights.
        casts: whether it is asked about plain tensors too, which costs as much as all the rest.
        plain: the class of tensors that have records.
    """
    kind = type(tensor)
    if kind is nn.Parameter:
        return WEIGHT
    if kind is not plain and is_parameter(tensor):
        return WEIGHT
    base = tensor._base
    if base is not None and (type(base) is nn.Parameter or is_parameter(base)):
        return WEIGHT
    if kind is not plain:
        return WEIGHT if chains.lead_to_parameter(tensor) else ODD
    if not (tensor.is_cpu or is_streamed(tensor)):
        return ODD
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError) as error:  # sparse, functorch wrappers, a zero tensor once
        interrupts.pass_on_from_call(error)
        return ODD
    mark = getattr(storage, MARK, None)
    if mark is weights.WEIGHT:
        return WEIGHT
    storage_bytes = storage.nbytes()
    if storage_bytes < sizes.storage_bytes:
        return SMALL
    if tensor.is_nested:
        return ODD
    cast = casts and chains.lead_to_parameter(tensor)
    # Not by Sighting(...), which is a Python function and would be called for every saved tensor.
    return tuple.__new__(Sighting, (storage, storage_bytes, tensor.nbytes, mark, cast))
