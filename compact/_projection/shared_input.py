"""SharedInput: what is kept of one tensor for all layers that read it (q, k and v; gate and up): z = x P, or rows.

Guarantees:

1. z is reused only for the tensor object it was made from, unchanged by its version counter, and only by a layer that
   would make an equal one: equal projection (kind, size, key) or sample, and equal dtype.
2. At most one z is held, and none once the tensor is dead.
3. Any thread may call. Two threads at once may each make z, equal to the last bit; the later one is held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .projection import Projection
from .rows import Rows

Made = TypeVar("Made")


class SharedInput:
    """Cache of the last projected input. Copies and pickles are empty."""

    __slots__ = ("__weakref__", "_last")

    def __init__(self) -> None:
        self._last = WeakIdKeyDictionary()  # input -> (its version, projection, dtype, z)

    def projected(self, x: Tensor, projection: Projection | Rows, dtype: torch.dtype, make: Callable[[], Made]) -> Made:
        """Return what a projection or sample makes of x cast to `dtype`: the held one, or a new one from `make`."""
        if x.is_inference():  # has no version counter
            return make()
        version, *which, z = self._last.get(x, (None, None))
        if version == x._version and which == [projection, dtype]:
            return z  # type: ignore[no-any-return]
        z = make()
        # Replace the whole dictionary: other threads see the old or the new one, each with one entry.
        last = WeakIdKeyDictionary()
        last[x] = x._version, projection, dtype, z
        self._last = last
        return z

    def __reduce__(self) -> tuple[Any, ...]:
        return (SharedInput, ())
