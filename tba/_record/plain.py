"""Plain: tensors that can move (strided, with a storage, in host or CUDA memory), and why others cannot.

A wrapper subclass (DTensor, quantized and jagged tensors) keeps its elements in inner tensors. Without them it is a
`Shell`, which stays in the graph while they move. So is a nested tensor of the strided layout without its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, strided

from .._device.kinds import is_streamed
from .._errors import edited_in_place
from .._torch.modes import quiet
from .._torch.private import JAGGED_VALUES, DisableTorchFunction, innermost, taken_apart
from .view import as_it_lies, empty

_COMMON = Tensor, nn.Parameter  # nearly all tensors: looking for inner ones would cost more than the rest of a hook


def why_not_plain(tensor: Tensor) -> str:
    """Name what keeps a tensor from being plain, for statistics: its class, layout or device."""
    if type(tensor) is not Tensor:
        return type(tensor).__name__
    if tensor.is_quantized:
        return "quantized"
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
    """A saved tensor without the inner tensors that move: enough to make an equal one around equal inner tensors.

    An in-place operator bumps the version of the wrapper, not of the inner tensor that it edits. So the shell keeps a
    tensor without bytes that shares the wrapper's version counter.

    Attributes:
        counter: that tensor.
        bound: an inner tensor stays in memory, so edits of the wrapper may reach it at any time.
    """

    __slots__ = ("_kind", "_make", "_names", "_size", "_version", "bound", "counter")

    def __init__(
        self, kind: str, size: Any, counter: Tensor, names: list[str], make: Callable[[dict[str, Any]], Tensor]
    ) -> None:
        self._kind, self._size = kind, size
        self._names = names
        self._make = make
        self._version = counter._version
        self.counter = counter
        self.bound = False

    def around(self, parts: Iterable[Any], unpack: Callable[[Any, Any], Tensor], asker: Any) -> Tensor:
        """Make the wrapper around inner tensors, each unpacked for `asker`.

        Raises PyTorch's own RuntimeError if an inner tensor that stayed was edited, and what `unpack` raises.
        """
        if self.bound and self.counter._version != self._version:
            raise edited_in_place(f"{self._kind} {list(self._size)}", self.counter._version, self._version)
        with quiet(), torch.no_grad(), DisableTorchFunction():
            return self._make({name: unpack(part, asker) for name, part in zip(self._names, parts, strict=True)})


def opened(tensor: Tensor) -> tuple[Shell, list[Tensor]] | None:
    """Take a wrapper subclass apart into its shell and inner tensors; None if impossible, and for other tensors.

    Of a jagged one only the values are taken out: its sizes are symbols that belong to the very tensor of its offsets.
    """
    if type(tensor) is Tensor:
        return _nested(tensor) if tensor.is_nested else None
    with DisableTorchFunction():
        apart = taken_apart(tensor)
        if apart is None:
            return None
        attributes, context = apart
        inner = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
        if tensor.is_nested:
            inner = {name: value for name, value in inner.items() if name == JAGGED_VALUES}
        counter = tensor.detach()
        if not inner or counter is tensor:
            return None
        try:
            for name, value in inner.items():
                setattr(counter, name, empty(value.dtype, value.device))
        except AttributeError:  # the attribute cannot be set, so the counter would keep the memory
            return None
        others = {name: value for name, value in attributes.items() if name not in inner}
        kind: Any = type(tensor)
        size, stride = tensor.size(), tensor.stride()

    def make(inner: dict[str, Any]) -> Tensor:
        return kind.__tensor_unflatten__({**others, **inner}, context, size, stride)  # type: ignore[no-any-return]

    return Shell(kind.__name__, size, counter, list(inner), make), list(inner.values())


def _nested(tensor: Tensor) -> tuple[Shell, list[Tensor]]:
    """Take a nested tensor of the strided layout apart, as pickle does: the memory that it is in, all its rows in one.

    It begins its storage, and so does the one that comes back, as PyTorch counts the rows' offsets from there.
    """
    rebuild, (values, *rows) = tensor.detach().__reduce_ex__(2)
    counter = as_it_lies(values.detach())
    counter.data = empty(values.dtype, values.device)
    return Shell("NestedTensor", rows[0], counter, ["values"], lambda inner: rebuild(inner["values"], *rows)), [values]
