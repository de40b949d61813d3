"""Operators: what a compiled graph calls to move a tensor: `tba::out`, `done`, `ahead` and `back`.

In forward, behind the kernel that makes a tensor, `out` begins its write and gives a token, which is saved instead.
Once the graph has no more use for the tensor, `done` waits for the write: only then may the compiler reuse that memory.
In backward `ahead` begins the read, and `back` gives the tensor.

They are opaque: the compiler sees a tensor that goes in and a token, one int64, that comes out, and moves none of them
past another that it needs. Each carries the number of the tensor in its graph (`Item`), so no two are alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from .._errors import OffloadError
from .carrier import Carrier, moved_by
from .choice import Windows

_numbers = count(1)
_items: weakref.WeakValueDictionary[int, Item] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class Item:
    """A saved tensor of one compiled graph that moves.

    Attributes:
        carrier: moves it; dies with its Offloader or backend, and with the last graph that has its tokens.
        size, stride: as the graph has it; strides are those that the compiler chose once it has compiled the forward.
        dtype, device: of the tensor.
        nbytes: that it spans, at the sizes that the graph was compiled for.
        windows: of its graph's transfers.
        shared: the memory is also an output or an input of the graph, so others may edit it: it is copied, and stays.
        beside_bytes: that stay in memory when this one, the first of its graph, moves.
        number: names it in its graph.
    """

    carrier: weakref.ref[Carrier]
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    windows: Windows
    shared: bool = False
    beside_bytes: int = 0
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        _items[self.number] = self

    def laid_out(self, stride: tuple[Any, ...]) -> None:
        """Note the strides that the compiled forward gives the tensor."""
        self.stride = stride

    def share(self) -> None:
        """Note that others may edit the memory."""
        self.shared = True


def item(number: int) -> Item:
    """Find an item by its number. The backend that made it keeps it, and the compiled code the backend."""
    return _items[number]


def _out(tensor: Tensor, number: int) -> Tensor:
    found = item(number)
    carrier = found.carrier()
    if carrier is None:
        raise OffloadError("a compiled graph was called whose Offloader is gone; call the compiled model instead")
    beside_bytes, window_bytes = found.beside_bytes, found.windows.out_bytes
    return carrier.out(tensor, moves=not found.shared, beside_bytes=beside_bytes, window_bytes=window_bytes)


def _done(token: Tensor, tensor: Tensor, number: int) -> Tensor:
    moved = moved_by(token)
    return moved.carrier.done(moved, tensor)


def _ahead(token: Tensor, number: int) -> Tensor:
    moved = moved_by(token)
    moved.carrier.ahead(moved)
    return torch.empty(1, dtype=torch.int64)


def _back(token: Tensor, begun: Tensor, number: int) -> Tensor:
    moved = moved_by(token)
    return moved.carrier.back(moved)


def token_like(*_: object) -> Tensor:
    """Make what a token looks like to the compiler."""
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _back_like(token: Tensor, begun: Tensor, number: int) -> Tensor:
    found = item(number)
    return torch.empty_strided(found.size, found.stride, dtype=found.dtype, device=found.device)


_library = torch.library.Library("tba", "FRAGMENT")


def _define(schema: str, run: Callable[..., Tensor], like: Callable[..., Tensor]) -> Any:
    name = schema.partition("(")[0]
    # The compiler may choose strides as freely as for a tensor that it saves.
    _library.define(schema, tags=(torch.Tag.flexible_layout,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tba::{name}", like, lib=_library)
    return getattr(torch.ops.tba, name).default


OUT = _define("out(Tensor tensor, int number) -> Tensor", _out, token_like)
DONE = _define("done(Tensor token, Tensor tensor, int number) -> Tensor", _done, token_like)
AHEAD = _define("ahead(Tensor token, int number) -> Tensor", _ahead, token_like)
BACK = _define("back(Tensor token, Tensor begun, int number) -> Tensor", _back, _back_like)
