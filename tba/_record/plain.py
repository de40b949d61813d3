"""Plain: tensors that can move (strided, with a storage, in host or CUDA memory), and why others cannot.

A wrapper subclass (DTensor, quantized tensors) keeps its elements in inner tensors. Without them it is a `Shell`, which
stays in the graph while they move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, strided

from .._device.kinds import is_streamed
from .._errors import edited_in_place
from .._torch.modes import quiet
from .._torch.private import DisableTorchFunction, innermost, taken_apart
from .view import empty

_COMMON = Tensor, nn.Parameter  # nearly all tensors: looking for inner ones would cost more than the rest of a hook


def why_not_plain(tensor: Tensor) -> str:
    """Name what keeps a tensor from being plain, for statistics: its class, layout or device."""
    if type(tensor) is not Tensor:
        return type(tensor).__name__
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    if tensor.layout is not strided:
        return str(tensor.layout)
    return "no storage" if tensor.is_cpu or is_streamed(tensor) else tensor.device.type


def shown_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; 0 for an opaque tensor."""
    try:
        return tensor.numel() * tensor.itemsize
    except RuntimeError:  # opaque
        return 0


def held_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements in this process; for a wrapper subclass, those of its inner tensors."""
    if type(tensor) in _COMMON:
        try:
            return tensor.nbytes
        except RuntimeError:  # a sparse one has no such count
            return shown_bytes(tensor)
    return sum(map(shown_bytes, innermost(tensor)))


class Shell:
    """A saved wrapper subclass without its inner tensors: enough to make an equal one around equal inner tensors.

    An in-place operator bumps the version of the wrapper, not of the inner tensor that it edits. So the shell keeps a
    tensor without bytes that shares the wrapper's version counter.

    Attributes:
        counter: that tensor.
        bound: an inner tensor stays in memory, so edits of the wrapper may reach it at any time.
    """

    __slots__ = ("_context", "_kind", "_names", "_others", "_size", "_stride", "_version", "bound", "counter")

    def __init__(self, tensor: Tensor, counter: Tensor, names: list[str], others: dict[str, Any], context: Any) -> None:
        self._context = context
        self._kind: Any = type(tensor)
        self._names = names
        self._others = others
        self._size, self._stride = tensor.size(), tensor.stride()
        self._version = tensor._version
        self.counter = counter
        self.bound = False

    def around(self, parts: Iterable[Any], unpack: Callable[[Any, Any], Tensor], asker: Any) -> Tensor:
        """Make the wrapper around inner tensors, each unpacked for `asker`.

        Raises PyTorch's own RuntimeError if an inner tensor that stayed was edited, and what `unpack` raises.
        """
        if self.bound and self.counter._version != self._version:
            name = f"{self._kind.__name__} {list(self._size)}"
            raise edited_in_place(name, self.counter._version, self._version)
        with quiet(), torch.no_grad(), DisableTorchFunction():
            inner = {name: unpack(part, asker) for name, part in zip(self._names, parts, strict=True)}
            attributes = {**self._others, **inner}
            tensor: Tensor = self._kind.__tensor_unflatten__(attributes, self._context, self._size, self._stride)
        return tensor


def opened(tensor: Tensor) -> tuple[Shell, list[Tensor]] | None:
    """Take a wrapper subclass apart into its shell and inner tensors; None if impossible, and for other tensors.

    Nested tensors cannot be taken apart: their sizes are symbols that belong to one inner tensor.
    """
    if tensor.is_nested:
        return None
    with DisableTorchFunction():
        apart = taken_apart(tensor)
        if apart is None:
            return None
        attributes, context = apart
        inner = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
        counter = tensor.detach()
        if not inner or counter is tensor:
            return None
        try:
            for name, value in inner.items():
                setattr(counter, name, empty(value.dtype, value.device))
        except AttributeError:  # the attribute cannot be set, so the counter would keep the memory
            return None
        others = {name: value for name, value in attributes.items() if name not in inner}
        return Shell(tensor, counter, list(inner), others, context), list(inner.values())
