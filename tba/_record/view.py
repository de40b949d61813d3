"""View: how one saved tensor looks at its storage, and tensors that look at memory of the engine's the same way."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .._memory.streams import raw_bytes

_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))


@cache
def empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    """One for all: nobody can write to a tensor without elements."""
    with torch.inference_mode(False):  # the first to ask may be in it, and its tensors cannot be used outside
        return torch.empty(0, dtype=dtype, device=device)


class View(NamedTuple):
    """How one saved tensor looks at its storage. `offset`, `size` and `stride` in elements of `dtype`."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool
    neg: bool

    @staticmethod
    def of(tensor: Tensor) -> View:
        dtype = tensor.dtype
        conj = dtype in _COMPLEX and tensor.is_conj()  # a look-up costs less than asking the dtype
        # Not by View(...), which is a Python function: one is made for every saved tensor.
        return tuple.__new__(
            View, (dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), conj, tensor.is_neg())
        )

    def on(self, whole: Tensor) -> Tensor:
        """The same over the storage of `whole`, which lies as the original did. Shares its version counter."""
        if whole.is_neg() or whole.is_conj():
            return self._with_counter_of(whole, 0)
        return self.on_plain(whole)

    def on_plain(self, whole: Tensor, begin_bytes: int = 0) -> Tensor:
        """The same where `whole` is neither conjugated nor negated, and may begin within the original: a view of it."""
        if self.dtype is not whole.dtype:
            return self._with_counter_of(whole, begin_bytes)
        offset = self.offset
        if begin_bytes:
            offset -= begin_bytes // self.dtype.itemsize
        tensor = whole.as_strided(self.size, self.stride, offset)  # half the price of `over`
        return self._turned(tensor) if self.conj or self.neg else tensor

    def over(self, storage: torch.UntypedStorage, begin_bytes: int) -> Tensor:
        """A new tensor that looks the same way at `storage`, whose first byte is byte `begin_bytes` of the original."""
        offset = self.offset
        if begin_bytes:
            offset -= begin_bytes // self.dtype.itemsize
        tensor = empty(self.dtype, storage.device).new_empty(0)  # cheaper than torch.empty
        tensor.set_(storage, offset, self.size, self.stride)
        return self._turned(tensor)

    def _with_counter_of(self, whole: Tensor, begin_bytes: int) -> Tensor:
        tensor = whole.detach()
        tensor.data = self.over(whole.untyped_storage(), begin_bytes)
        return tensor

    def _turned(self, tensor: Tensor) -> Tensor:
        if self.conj:
            tensor = torch._conj(tensor)
        if self.neg:
            tensor = torch._neg_view(tensor)
        return tensor


def counted(storage: torch.UntypedStorage) -> Tensor:
    """The bytes of a storage, uint8 [nbytes], whose version counter stands at 0: see `is_edited`."""
    flat = empty(torch.uint8, storage.device).new_empty(0)
    flat.set_(storage)
    return flat.data  # setting it has been counted


def is_edited(tensor: Tensor) -> bool:
    """Whether memory the engine has filled was edited, through any view of this tensor of it.

    Hooks that look at their node's tensors, and code that recomputes, get them as operators do, which only read.
    """
    return not tensor.is_inference() and tensor._version != 0


def span(tensor: Tensor, view: View) -> tuple[int, int]:
    """The bytes of its storage that a non-empty strided tensor, which looks so, touches: [first, behind the last)."""
    itemsize = view.dtype.itemsize
    begin = view.offset * itemsize
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(view.size, view.stride, strict=True))
    return begin, begin + (last + 1) * itemsize


def is_over(base: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether a view over `storage` still shares memory with its base, seen as plainly.

    Not where one of them was given other memory (`x.data = ...`), nor where the base is sparse or nested.
    """
    return base.layout is torch.strided and not base.is_nested and base.untyped_storage() is storage


def apart(tensor: Tensor) -> Tensor:
    """The same as a strided, non-empty tensor in memory of its own, offset and all: a copy of the bytes it spans."""
    view = View.of(tensor)
    begin, end = span(tensor, view)
    ours = torch.empty(end, dtype=torch.uint8, device=tensor.device)
    ours[begin:].copy_(raw_bytes(tensor, begin, end - begin))
    return view.over(ours.untyped_storage(), 0)
