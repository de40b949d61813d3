"""The hook-cost arm: what saving one tensor costs the calling thread, by kind, above an empty pair of hooks.

A chain of autograd functions saves one prepared tensor each and computes next to nothing. The chain is run under the
empty pair and under the engine, in turns within one process, and the difference is divided by the number of tensors.
What is counted is the calling thread: pack in the forward, unpack in the backward (of CPU tensors that is the calling
thread too) and letting the graph go. Two stretches are outside of the clock, under both pairs: between forward and
backward the writes are flushed, and after the first unpack, which asks for what follows, there is a pause in which the
reads come in. In training compute fills these; without them the cost of waiting would be measured instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# 64 KiB: no work on the calling thread depends on the size.
_RECORD_ELEMENTS = 16 << 10
_WIDTH = 128
_PAUSE_S = 0.03

KINDS = ("weight", "below minimum size", "further view", "new record")


@dataclass(frozen=True, kw_only=True)
class HookOptions:
    """`tensors`: how many a chain saves."""

    tensors: int


@dataclass
class _Clock:
    """Seconds of the calling thread's CPU and of wall time, while it runs."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    _begun: tuple[float, float] | None = field(default=None, repr=False)

    def start(self) -> None:
        self._begun = time.thread_time(), time.perf_counter()

    def stop(self) -> None:
        now_cpu_s, now_s = time.thread_time(), time.perf_counter()
        if self._begun is not None:
            self.cpu_s += now_cpu_s - self._begun[0]
            self.wall_s += now_s - self._begun[1]
        self._begun = None


class _Save(torch.autograd.Function):
    """Passes a scalar through and saves one tensor, as the operators of a model do."""

    @staticmethod
    def forward(
        ctx: Any, scalar: Tensor, held: list[Tensor], before: Callable[[], None] | None, clock: _Clock | None
    ) -> Tensor:
        # Taken out of the list: from here on the graph alone holds the tensor, as with an activation.
        ctx.save_for_backward(held.pop())
        ctx.before, ctx.clock = before, clock
        return scalar.view_as(scalar)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.before is not None:
            ctx.before()
        ctx.saved_tensors  # noqa: B018 - this is the unpack
        if ctx.clock is not None:
            ctx.clock.stop()
            time.sleep(_PAUSE_S)
            ctx.clock.start()
        return gradients[0], None, None, None


class HookArm:
    """Every kind of saved tensor, once under the empty pair and once under the engine per turn."""

    def __init__(self, options: HookOptions) -> None:
        from tba import offload_context

        self.options = options
        self.model = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(options.tensors))
        # Kinds differ by what is saved and by the minimum size that lets it in or not.
        self.moves = offload_context(self.model, tier="nvme", min_tensor_bytes=0)
        self.passes = offload_context(self.model, tier="nvme", min_tensor_bytes=1 << 20)

    def ready(self) -> dict[str, Any]:
        """Nothing to say."""
        return {}

    def turn(self, index: int) -> dict[str, Any]:
        """Per kind: microseconds per tensor of calling-thread CPU and of wall time less waiting, under each pair."""
        answer: dict[str, Any] = {}
        for kind in KINDS:
            pairs = ("empty", "engine") if index % 2 == 0 else ("engine", "empty")
            answer[kind] = {pair: self._measure(kind, pair) for pair in pairs}
        return answer

    def close(self) -> dict[str, Any]:
        """Close both offloaders; the counters prove that each kind was what it is called."""
        counters = {}
        for name, offload in (("moves", self.moves), ("passes", self.passes)):
            stats = offload.stats()
            fields = ("saved_bytes", "weight_bytes", "duplicate_bytes", "kept_bytes", "offloaded_bytes", "read_bytes")
            counters[name] = {field: getattr(stats, field) for field in fields}
            offload.close()
        return counters

    def _measure(self, kind: str, pair: str) -> dict[str, float]:
        count = self.options.tensors
        offload = self.passes if kind == "below minimum size" else self.moves
        under: Callable[[], AbstractContextManager[Any]]
        under = _empty_pair if pair == "empty" else lambda: offload
        scalar = torch.zeros((), requires_grad=True)
        held = self._tensors(kind)
        clock = _Clock()
        with under():
            # The opener is not counted: it begins the step, and of the views it is the one that makes the record.
            out = _Save.apply(scalar, held, clock.stop, None)
            waited_s = offload.stats().wait_s
            clock.start()
            for _ in range(count - 1):
                out = _Save.apply(out, held, None, None)
            out = _Save.apply(out, held, None, clock)  # unpacked first: the pause follows it
            clock.stop()
            offload.flush()
            clock.start()
            out.backward()
            waited_s = offload.stats().wait_s - waited_s
        return {"cpu_us": 1e6 * clock.cpu_s / count, "wall_us": 1e6 * (clock.wall_s - waited_s) / count}

    def _tensors(self, kind: str) -> list[Tensor]:
        count = self.options.tensors + 1
        if kind == "weight":
            # What a linear layer saves: the transposed view of a parameter.
            weights = [layer.weight.t() for layer in self.model]
            return [*weights, weights[0]]
        if kind == "below minimum size":
            return [torch.zeros(16) for _ in range(count)]
        if kind == "further view":
            base = torch.zeros(_RECORD_ELEMENTS)
            return [base.view(_WIDTH, -1) for _ in range(count)]
        return [torch.zeros(_RECORD_ELEMENTS) for _ in range(count)]


def _empty_pair() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor
