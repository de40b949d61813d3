"""Places: saved-tensor hooks that know which call of which function saves a tensor; the base of arms by papers.

A place is a function's name, the number of its call within the forward, and the number of the tensor within the call.
The forward must make the same calls in each step. Only tensors as large as their function's first argument are shown:
inputs of linear layers, norms and activations, q, k, v and the output of attention. Weights, statistics, indices and
the loss's own probabilities stay as they are, exact, in every arm.

All of it stands on public seams of PyTorch: a torch-function mode and `saved_tensors_hooks`.
"""

from __future__ import annotations

import abc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LINEAR, NORM, ACTIVATION, ATTENTION = "linear", "layer_norm", "gelu", "scaled_dot_product_attention"
_FUNCTIONS = frozenset({LINEAR, NORM, ACTIVATION, ATTENTION})
_EARLY = 25  # steps


class Place(NamedTuple):
    """Where in a forward a tensor is saved."""

    function: str
    call: int
    tensor: int


class Packed(Protocol):
    """What is held instead of a tensor."""

    @property
    def nbytes(self) -> int: ...

    def restore(self) -> Tensor: ...


class PlacedHooks(abc.ABC):
    """Hooks of a model that pack tensors by their place.

    Subclasses say what is held (`encode`) and learn from the training (`learn`): every `period` steps, and before the
    first period ends at steps 25, 50, 100 and so on. The papers' runs are so long that how they begin matters little;
    in a short one, what was learned of random weights would serve for a quarter of it.

    Attributes:
        period: steps from one learning to the next.
        learn_s: seconds of the last one.
        forwards: how many there were.
        held_bytes: of what the last forward saved: packed bytes, and storages that were kept, once each, but no weight.
    """

    period: int

    def __init__(self, model: nn.Module) -> None:
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self._calls: Counter[str] = Counter()
        self._now: tuple[str, int, int] | None = None  # function, call, elements of its first argument
        self._within = 0
        self._packed_bytes = 0
        self._kept: dict[int, int] = {}
        self.forwards, self.learn_s = 0, 0.0

    @abc.abstractmethod
    def encode(self, place: Place, tensor: Tensor) -> Packed | None:
        """Pack a tensor; None keeps it."""

    @abc.abstractmethod
    def learn(self, run: Callable[[], None]) -> None:
        """Learn what packing needs from `run`, a forward and backward of the step whose gradients nobody else needs."""

    @property
    def held_bytes(self) -> int:
        return self._packed_bytes + sum(self._kept.values())

    @contextmanager
    def step(self, index: int, run: Callable[[], None]) -> Iterator[None]:
        """Train step `index` within, clearing gradients first: where it is due, `run` has been learned from before."""
        if self.is_due(index):
            begun_s = time.perf_counter()
            self.learn(run)
            self.learn_s = time.perf_counter() - begun_s
        with self.packing():
            yield

    def is_due(self, index: int) -> bool:
        """Whether step `index` is one to learn at."""
        doublings, rest = divmod(index, _EARLY)
        return index % self.period == 0 or (index < self.period and rest == 0 and doublings.bit_count() == 1)

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Pack what one forward within saves."""
        self.forwards += 1
        self._calls.clear()
        self._kept.clear()
        self._packed_bytes = 0
        with _Mode(self), torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def is_kept(self, tensor: Tensor) -> bool:
        """Whether this forward keeps the tensor's memory anyway."""
        return tensor.untyped_storage().data_ptr() in self._kept

    def call(self, function: str, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run a function, under its name."""
        if function not in _FUNCTIONS or not args:
            return run()
        outer, number = (self._now, self._within), self._calls[function]
        self._calls[function] += 1
        self._now, self._within = (function, number, args[0].numel()), 0
        try:
            return run()
        finally:
            self._now, self._within = outer

    def _pack(self, tensor: Tensor) -> Tensor | Packed:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._weights:
            return tensor
        if self._now is not None and tensor.is_floating_point() and tensor.numel() == self._now[2]:
            place = Place(*self._now[:2], self._within)
            self._within += 1
            packed = self.encode(place, tensor.detach())
            if packed is not None:
                self._packed_bytes += packed.nbytes
                return packed
        self._kept[storage.data_ptr()] = storage.nbytes()
        return tensor


def _unpack(held: Tensor | Packed) -> Tensor:
    return held if isinstance(held, Tensor) else held.restore()


class _Mode(TorchFunctionMode):
    """Tells hooks which function runs."""

    def __init__(self, hooks: PlacedHooks) -> None:
        super().__init__()
        self._hooks = hooks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._hooks.call(getattr(func, "__name__", ""), args, lambda: func(*args, **(kwargs or {})))
