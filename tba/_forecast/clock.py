"""Clock: the time that a device would need for the operators of a fake step, and the bytes alive at each moment."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

_aten = torch.ops.aten
# Kinds of storages; OTHER is everything else.
WEIGHT, GRADIENT, SAVED, OTHER = "weight", "gradient", "saved", "other"


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Count the two products of attention; shapes are [batch, heads, positions, width].

    Keys and values may have fewer heads than queries: each is then multiplied once for each query in its group.
    """
    batch, heads, positions, width = query
    return int(2 * batch * heads * positions * key[-2] * (width + value[-1]))


def _attention_back_flops(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Count the five products of its backward, one of which is recomputed."""
    return _attention_flops(query, key, value) * 5 // 2


# FlopCounterMode does not know these: none on a CPU; on a GPU, in torch 2.11, not those with grouped queries.
_MAPPING: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_back_flops,
    _aten._scaled_dot_product_flash_attention: _attention_flops,
    _aten._scaled_dot_product_flash_attention_backward: _attention_back_flops,
}


class Clock(TorchDispatchMode):
    """Counts the time of each operator that runs inside it, and the live bytes of each kind.

    Args:
        seconds: computes an operator's time from its floating point operations, the bytes it reads and writes, and its
            dtype.

    Attributes:
        now_s: time since the beginning.
        flops: floating point operations so far.
        live_bytes: by kind; what an operator makes is OTHER until `call` gives it another kind.
        most_other_bytes: maximum of OTHER at once.
        most_bytes: maximum of everything but WEIGHT at once.
    """

    def __init__(self, seconds: Callable[[float, int, torch.dtype | None], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_s = 0.0
        self.flops = 0
        self.live_bytes = {OTHER: 0}
        self.most_other_bytes = self.most_bytes = 0
        self._seconds = seconds
        self._counter = FlopCounterMode(display=False, custom_mapping=_MAPPING)
        self._kinds: dict[int, str] = {}

    def __enter__(self) -> Any:
        self._counter.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._counter.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flops = self._counter.get_total_flops()
        found, self.flops = flops - self.flops, flops
        if func.is_view or torch.Tag.inplace_view in func.tags or func.namespace == "prim":  # does no work
            return out
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.now_s += self._seconds(found, sum(map(_bytes, tensors)) + sum(map(_bytes, made)), _dtype(tensors))
        for tensor in made:
            self._note(tensor.untyped_storage())
        return out

    def call(self, storage: UntypedStorage, kind: str) -> None:
        """Give a storage another kind."""
        self._note(storage)
        key, nbytes = id(storage), storage.nbytes()
        self.live_bytes[self._kinds[key]] -= nbytes
        self._kinds[key] = kind
        self._add(kind, nbytes)

    def _note(self, storage: UntypedStorage) -> None:
        key = id(storage)
        if key in self._kinds:
            return
        self._kinds[key] = OTHER
        nbytes = storage.nbytes()
        self._add(OTHER, nbytes)
        weakref.finalize(storage, self._forget, key, nbytes).atexit = False

    def _forget(self, key: int, nbytes: int) -> None:
        self.live_bytes[self._kinds.pop(key)] -= nbytes

    def _add(self, kind: str, nbytes: int) -> None:
        self.live_bytes[kind] = self.live_bytes.get(kind, 0) + nbytes
        self.most_other_bytes = max(self.most_other_bytes, self.live_bytes[OTHER])
        self.most_bytes = max(self.most_bytes, sum(self.live_bytes.values()) - self.live_bytes.get(WEIGHT, 0))


def _bytes(tensor: Tensor) -> int:
    """Count the bytes that reading or writing a tensor moves: fewer for an expanded one."""
    return int(min(tensor.nbytes, tensor.untyped_storage().nbytes()))


def _dtype(tensors: list[Tensor]) -> torch.dtype | None:
    """Return the dtype in which an operator multiplies: that of its first floating-point tensor."""
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
