"""Strided tensors: which elements to store, in which order, and how to restore the tensor from them.

A tensor comes back with its exact strides: other strides would select other kernels and change the last bit of results.
Shape and stride distinguish three cases:

dense      a permutation of a contiguous tensor: its memory in order, without a copy on either side
gapped     elements with gaps between them (`x[:, ::2]`): each once, in memory order; the gaps come back unset
expanded   dimensions of stride 0: their one element; overlapping windows (`unfold`): the memory under them

The offset into a storage is not kept: a decoded tensor begins its own storage. Conjugate and negative bits are
resolved.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._errors import UnsupportedTensor


class Spec(NamedTuple):
    """Shape, stride, dtype and device of a tensor. Strides are in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """Describe a plain strided tensor. Raises UnsupportedTensor for sparse and other layouts."""
        if tensor.layout is not torch.strided:
            raise UnsupportedTensor(
                f"a codec was given a tensor of layout {tensor.layout} and shape {list(tensor.shape)}: codecs take "
                "strided tensors only; store its parts one by one"
            )
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def numel(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    def stored_numel(self) -> int:
        """Number of elements to store: fewer than the logical ones if they share memory (expanded tensors)."""
        return math.prod(stored(self.shape, self.stride)[0])

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored elements."""
        return self.stored_numel * self.dtype.itemsize


def _walk(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[list[tuple[int, int]], int, bool]:
    """(stride, size) of dimensions that move, outermost first; the last element's index; whether windows overlap."""
    dims = sorted(((st, n) for n, st in zip(shape, stride, strict=True) if n > 1 and st), reverse=True)
    last, windows = 0, False
    for step, count in reversed(dims):
        windows = windows or step <= last
        last += step * (count - 1)
    return dims, last, windows


def stored(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of the view, at the tensor's own offset, that holds each stored element once."""
    if 0 in shape:
        return (0,), (1,)
    dims, last, windows = _walk(shape, stride)
    if windows:
        return (last + 1,), (1,)
    return tuple(n for _, n in dims), tuple(st for st, _ in dims)


def shares_memory(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two elements may share a memory location (expanded or windowed tensors)."""
    if 0 in shape:
        return False
    return any(n > 1 and not st for n, st in zip(shape, stride, strict=True)) or _walk(shape, stride)[2]


def flat(tensor: Tensor, *, logical: bool = False) -> Tensor:
    """Flatten the elements: a view if they are in memory order, else a copy.

    Args:
        tensor: strided.
        logical: every logical element in row-major order [numel]; else the stored ones in memory order [stored_numel].
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    if logical:
        return plain.contiguous().view(-1)
    return plain.as_strided(*stored(tuple(plain.shape), plain.stride())).contiguous().view(-1)


class Target:
    """A tensor being restored: write all of `flat`, then call `tensor()`.

    Args:
        spec: of the tensor.
        device: where to make it.
        logical: elements come in the order of `flat(logical=True)`. A tensor whose elements shared memory then comes
            back contiguous.

    Attributes:
        flat: [stored_numel], or [numel] if logical, of the tensor's dtype; the new tensor's own memory if possible.
    """

    def __init__(self, spec: Spec, device: torch.device, *, logical: bool = False) -> None:
        if logical and shares_memory(spec.shape, spec.stride):
            self._tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        else:
            self._tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        self._view = self._tensor if logical else self._tensor.as_strided(*stored(spec.shape, spec.stride))
        self._direct = self._view.is_contiguous()
        self.flat = self._view.view(-1) if self._direct else self._view.new_empty(self._view.numel())

    def tensor(self) -> Tensor:
        """Return the finished tensor."""
        if not self._direct:
            self._view.copy_(self.flat.view(self._view.shape))
        return self._tensor
