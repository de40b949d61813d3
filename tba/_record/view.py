"""View: the layout of one saved tensor in its storage, and tensors with that layout over the engine's memory."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .._device.streams import raw_bytes
from .._torch.private import negative_view

_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))


@cache
def empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without elements, shared by all callers, as nobody can write to it."""
    with torch.inference_mode(False):  # tensors made in inference mode cannot be used outside it
        return torch.empty(0, dtype=dtype, device=device)


class View(NamedTuple):
    """Layout of one saved tensor in its storage. `offset`, `size` and `stride` are in elements of `dtype`."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool
    neg: bool

    @staticmethod
    def of(tensor: Tensor) -> View:
        dtype = tensor.dtype
        conj = dtype in _COMPLEX and tensor.is_conj()  # the lookup costs less than asking each tensor
        # `View(...)` is a Python function, called for every saved tensor. The garbage collector stops tracking plain
        # tuples, but not a torch.Size.
        return tuple.__new__(
            View, (dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), conj, tensor.is_neg())
        )

    def on(self, whole: Tensor) -> Tensor:
        """Make a tensor with this layout over the storage of `whole`, a copy of the original. Shares its counter."""
        if whole.is_neg() or whole.is_conj():
            return self._with_counter_of(whole, 0)
        return self.on_plain(whole)

    def on_plain(self, whole: Tensor, begin_bytes: int = 0) -> Tensor:
        """As `on`, by a view: `whole` is neither conjugated nor negated, and begins at byte `begin_bytes`."""
        if self.dtype is not whole.dtype:
            return self._with_counter_of(whole, begin_bytes)
        offset = self.offset
        if begin_bytes:
            offset -= begin_bytes // self.dtype.itemsize
        tensor = whole.as_strided(self.size, self.stride, offset)  # takes half as long as `over`
        return self._turned(tensor) if self.conj or self.neg else tensor

    def over(self, storage: torch.UntypedStorage, begin_bytes: int) -> Tensor:
        """Make a new tensor with this layout over `storage`, whose first byte is byte `begin_bytes` of the original."""
        return self._turned(self._as_it_lies(storage, begin_bytes))

    def _as_it_lies(self, storage: torch.UntypedStorage, begin_bytes: int) -> Tensor:
        offset = self.offset
        if begin_bytes:
            offset -= begin_bytes // self.dtype.itemsize
        tensor = empty(self.dtype, storage.device).new_empty(0)  # cheaper than torch.empty
        tensor.set_(storage, offset, self.size, self.stride)
        return tensor

    def _with_counter_of(self, whole: Tensor, begin_bytes: int) -> Tensor:
        tensor = as_it_lies(whole.detach())
        tensor.data = self._as_it_lies(whole.untyped_storage(), begin_bytes)
        return self._turned(tensor)

    def _turned(self, tensor: Tensor) -> Tensor:
        if self.conj:
            tensor = tensor.conj()
        if self.neg:
            tensor = negative_view(tensor)
        return tensor


def as_it_lies(tensor: Tensor) -> Tensor:
    """A tensor of the same memory and version counter that is neither conjugated nor negated.

    PyTorch gives a tensor of some devices (PrivateUse1) other memory, by `.data`, only if both are or neither is.
    """
    if tensor.is_conj():
        tensor = tensor.conj()
    return negative_view(tensor) if tensor.is_neg() else tensor


def counted(storage: torch.UntypedStorage) -> Tensor:
    """Make a tensor over the bytes of a storage, uint8 [nbytes], with its version counter at 0: see `is_edited`."""
    flat = empty(torch.uint8, storage.device).new_empty(0)
    flat.set_(storage)
    return flat.data  # `set_` counted as an edit


def is_edited(tensor: Tensor) -> bool:
    """Whether memory that the engine filled was edited through any view of this tensor.

    Node hooks that read their node's tensors, and code that recomputes, get memory that operators share, and may edit
    it.
    """
    return not tensor.is_inference() and tensor._version != 0


def span(tensor: Tensor, view: View) -> tuple[int, int]:
    """The range of bytes `[begin, end)` that a non-empty strided tensor with this view spans in its storage."""
    itemsize = view.dtype.itemsize
    begin = view.offset * itemsize
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(view.size, view.stride, strict=True))
    return begin, begin + (last + 1) * itemsize


def view_and_span(tensor: Tensor) -> tuple[View, int, int]:
    """Return the layout of a non-empty strided tensor, and the range of bytes that it spans in its storage."""
    view = View.of(tensor)
    return view, *span(tensor, view)


def is_over(base: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether a tensor over `storage` still shares memory with its base, a strided tensor.

    It does not if one of them got other memory (`x.data = ...`), or if the base is sparse or nested.
    """
    return base.layout is torch.strided and not base.is_nested and base.untyped_storage() is storage


def apart(tensor: Tensor) -> Tensor:
    """Copy a strided, non-empty tensor to its own memory, keeping its offset: the copy has the bytes it spans."""
    view = View.of(tensor)
    begin, end = span(tensor, view)
    ours = torch.empty(end, dtype=torch.uint8, device=tensor.device)
    ours[begin:].copy_(raw_bytes(tensor, begin, end - begin))
    return view.over(ours.untyped_storage(), 0)
