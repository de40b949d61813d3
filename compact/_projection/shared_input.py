"""SharedInput: one projected input for the layers that read one tensor (q, k and v; gate and up).

Guarantees:

1. It is reused only for the very tensor object it was made of, unchanged since (by its version counter), and only by a
   layer that would make an equal one: same projection, same key, same dtype.
2. At most one is held, and none once the tensor has died.
3. Any thread may call; one that comes in between makes one of its own, equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .projection import Projection


class SharedInput:
    """Remembers the last projected input. Copies and pickles are empty."""

    __slots__ = ("__weakref__", "_last")

    def __init__(self) -> None:
        self._last = WeakIdKeyDictionary()  # input -> (its version, projection, dtype, z)

    def projected(self, x: Tensor, projection: Projection, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        """z = x P, x cast to `dtype`: remembered, or made by `make` and remembered."""
        if x.is_inference():  # has no version counter
            return make()
        version, *which, z = self._last.get(x, (None, None))
        if version == x._version and which == [projection, dtype]:
            return z  # type: ignore[no-any-return]
        z = make()
        # A dictionary of its own, set at once: it holds one entry whatever other threads do meanwhile.
        last = WeakIdKeyDictionary()
        last[x] = x._version, projection, dtype, z
        self._last = last
        return z

    def __reduce__(self) -> tuple[Any, ...]:
        return (SharedInput, ())
