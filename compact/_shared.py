"""SharedInput: one sketch for the layers that read one tensor (q, k and v; gate and up).

Guarantees:

1. A sketch is reused only for the very tensor object it was made of, unchanged since (by its version counter), and
   only by a layer that would make an equal one: same projection, same key, same dtype.
2. At most one sketch is held, and none once the tensor has died.
3. Any thread may call; one that comes in between makes a sketch of its own, equal to the last bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._sketch import Sketch

Saved = tuple[Tensor, ...]


class SharedInput:
    """Remembers the last sketch. Copies and pickles are empty."""

    __slots__ = ("__weakref__", "_entry")

    def __init__(self) -> None:
        self._entry: tuple[weakref.ref[Tensor], int, Sketch, torch.dtype, Saved] | None = None

    def saved(self, x: Tensor, sketch: Sketch, dtype: torch.dtype, make: Callable[[], Saved]) -> Saved:
        """What `sketch` saves of x cast to `dtype`: remembered, or made by `make` and remembered."""
        if x.is_inference():  # has no version counter
            return make()
        entry = self._entry  # one read, so that another thread's write cannot mix two entries
        if entry is not None:
            reference, version, *which, saved = entry
            if reference() is x and version == x._version and which == [sketch, dtype]:
                return saved
        saved, owner = make(), weakref.ref(self)

        def forget(reference: weakref.ref[Tensor]) -> None:
            shared = owner()
            if shared is not None and shared._entry is not None and shared._entry[0] is reference:
                shared._entry = None

        self._entry = (weakref.ref(x, forget), x._version, sketch, dtype, saved)
        return saved

    def __reduce__(self) -> tuple[Any, ...]:
        return (SharedInput, ())
