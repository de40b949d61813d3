"""The hook-cost arm: CPU time of the calling thread per saved tensor, by kind, above an empty pair of hooks.

Each product of a chain saves one prepared tensor and nothing else. The chain runs under the empty pair and under the
engine, in turns within one process, and the difference is divided by the number of tensors. It covers pack in forward,
unpack in backward (for CPU tensors also on the calling thread) and freeing the graph. In training, transfers progress
while the model computes between two tensors; here, both pairs pause outside the clock after every few tensors instead.
Otherwise the arm would measure waiting for the disk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .._processes.serve import Tell
from .._report.results import CannotMeasure
from .._workload.accelerator import open_device
from .._workload.instant_store import InstantStore
from .._workload.tools import empty_hooks

# Small: the products cost the same under both pairs, and no work of the hooks depends on the size.
_WIDTH = 64
_RECORD_BYTES = 4 * _WIDTH * _WIDTH
# The engine reads this many tensors ahead, and holds as many back from writing. As many are saved before the counted
# ones: then each counted pack writes one tensor and each counted unpack prefetches one, as in a long graph.
_WINDOW_TENSORS = 32
_PAUSE_EVERY = 16
_PAUSE_S = 0.004

_RECORD_OF_CHAIN_BYTES = 1 << 20

# Under a plan, tensors of this size move, and the counted ones stay because they are smaller.
_MOVED_BYTES = 1 << 20
_STEPS_UNTIL_LIGHT = 12
_MOST_TRIES = 50  # to get a light step: if the machine changes speed, the engine plans again, with full hooks

COUNTED, FOLLOWED = "counted: everything fits the budget", "kept: stays under a plan"
LIGHT = (COUNTED, FOLLOWED)
KINDS = ("weight", "below minimum size", "further view", "new record", *LIGHT)
STORES = ("a store that finishes at once", "the file")


class _Clock:
    """A clock of the calling thread: CPU and wall seconds while it runs."""

    def __init__(self) -> None:
        self.cpu_s = self.wall_s = 0.0
        self._matrix = torch.ones(128, 128)
        self._begun: tuple[float, float] | None = None

    def pause(self) -> None:
        """Stop for a moment, in which transfers progress; then start or continue."""
        self.stop()
        # Computing without Python's lock, as training would: a sleeping core comes back slow, with cold caches.
        until_s = time.perf_counter() + _PAUSE_S
        while time.perf_counter() < until_s:
            torch.mm(self._matrix, self._matrix)
        self._begun = time.thread_time(), time.perf_counter()

    def stop(self) -> None:
        now_cpu_s, now_s = time.thread_time(), time.perf_counter()
        if self._begun is not None:
            self.cpu_s += now_cpu_s - self._begun[0]
            self.wall_s += now_s - self._begun[1]
        self._begun = None


class _Then(torch.autograd.Function):
    """Passes a tensor through, and calls `call` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradients[0], None


class _Saves(torch.autograd.Function):
    """Passes a tensor through and saves another; backward unpacks it and does nothing with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        assert ctx.saved_tensors
        return gradients[0], None


class _Calls(nn.Module):
    """A model that saves a weight of its own, and then what `chain` saves."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH, _WIDTH, device=device), requires_grad=False)
        self.chain: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(x * self.weight)


class HookArm:
    """An arm that saves tensors of every kind, once under the empty pair and once under the engine per turn.

    Options: `tensors`, the number that a chain saves; `records`, the number of 1 MiB that a chain without pauses saves;
    `device`, where they are. On a GPU, the calling thread of backward is autograd's thread for that device.
    """

    def __init__(self, options: Mapping[str, Any], tell: Tell) -> None:
        from tba import OffloadConfig, Offloader, offload_context

        self.about: dict[str, Any] = {}
        self.count: int = options["tensors"]
        self.device = open_device(options["device"])
        self.model = nn.ModuleList(nn.Linear(4, 4, bias=False, device=self.device) for _ in range(self.count))
        self.model.requires_grad_(False)  # otherwise each product would save its other factor too
        # Kinds differ by what is saved, and by whether it reaches the minimum size.
        window = {"prefetch_bytes": _WINDOW_TENSORS * _RECORD_BYTES}
        self.moves = offload_context(self.model, tier="nvme", min_tensor_bytes=0, **window)
        self.passes = offload_context(self.model, tier="nvme", min_tensor_bytes=1 << 20)
        # One budget is twice what is saved; the other has room for the counted tensors and half of the large ones.
        kept_bytes = (self.count + 1) * _RECORD_BYTES
        large_bytes = (_WINDOW_TENSORS + 1) * _MOVED_BYTES
        budgets = {COUNTED: 2 * (kept_bytes + large_bytes), FOLLOWED: kept_bytes + large_bytes // 2}
        self.models = {kind: _Calls(self.device) for kind in LIGHT}
        self.light = {
            kind: offload_context(self.models[kind], memory_budget=budgets[kind], min_tensor_bytes=_RECORD_BYTES)
            for kind in LIGHT
        }
        for kind in LIGHT:
            for _ in range(_STEPS_UNTIL_LIGHT):
                self._measure(kind, "engine")
        self.before = {kind: self.light[kind].stats() for kind in LIGHT}
        self.records: int = options["records"]
        nvme = OffloadConfig(tier="nvme")
        stores = (Offloader(config=nvme, store=InstantStore()), Offloader(config=nvme))
        self.chains = dict(zip(STORES, stores, strict=True))

    def turn(self, index: int) -> dict[str, Any]:
        """Measure each kind under each pair: microseconds of CPU time per tensor, and of wall time without waiting.

        Also measure the chain of records through each store, above the empty pair: microseconds per record.
        """
        answer: dict[str, Any] = {}
        empty = self._chain(empty_hooks)
        for name, offload in self.chains.items():
            chain = self._chain(lambda offload=offload: offload)
            answer[name] = {clock: chain[clock] - empty[clock] for clock in chain}
        for kind in KINDS:
            pairs = ("empty", "engine") if index % 2 == 0 else ("engine", "empty")
            answer[kind] = {pair: self._measure_light(kind, pair) for pair in pairs}
        return answer

    def close(self) -> dict[str, Any]:
        """Close all offloaders; return counters that show that each kind is what its name says."""
        counters = {}
        fields = ("saved_bytes", "weight_bytes", "duplicate_bytes", "kept_bytes", "offloaded_bytes", "read_bytes")
        offloads = {"moves": self.moves, "passes": self.passes, **self.chains, **self.light}
        for name, offload in offloads.items():
            stats, before = offload.stats(), self.before.get(name)
            counters[name] = {field: getattr(stats, field) - getattr(before, field, 0) for field in fields}
            offload.close()
        return counters

    def _measure_light(self, kind: str, pair: str) -> dict[str, float]:
        """Measure; for a kind of light steps, measure the first light one, which looks for no weights."""
        if pair == "empty" or kind not in LIGHT:
            return self._measure(kind, pair)
        for _ in range(_MOST_TRIES):
            before_bytes = self.light[kind].stats().weight_bytes
            found = self._measure(kind, pair)
            if self.light[kind].stats().weight_bytes == before_bytes:
                return found
        raise CannotMeasure(f"{kind}: none of {_MOST_TRIES} steps was light: {self.light[kind].stats()}")

    def _measure(self, kind: str, pair: str) -> dict[str, float]:
        count = self.count
        offload = self.light.get(kind, self.passes if kind == "below minimum size" else self.moves)
        under: Callable[[], AbstractContextManager[Any]]
        under = empty_hooks if pair == "empty" else lambda: offload
        held = self._tensors(kind)
        out = torch.zeros(held[-1].shape, requires_grad=True, device=self.device) * 1
        clock, before_s, waited_s, pack_s = _Clock(), 0.0, 0.0, 0.0

        def behind_the_last() -> None:
            nonlocal before_s
            before_s = offload.stats().wait_s
            clock.pause()

        def ahead_of_the_first() -> None:
            nonlocal waited_s
            clock.stop()
            waited_s = offload.stats().wait_s - before_s

        def chain(out: Tensor) -> Tensor:
            nonlocal pack_s
            for _ in range(_WINDOW_TENSORS + 1):  # the first of several views makes the record
                # Popped: from here on only the graph holds the tensor, as it holds an activation.
                out = _Saves.apply(out, held.pop(0))
            out = _Then.apply(out, ahead_of_the_first)  # in backward, after the counted ones
            clock.pause()
            for number in range(count):
                pausing = kind == "new record" and number % _PAUSE_EVERY == 0
                if pausing:
                    clock.pause()
                out = out * held.pop()
                if pausing:
                    out = _Then.apply(out, clock.pause)
            clock.stop()
            pack_s = clock.cpu_s
            # The last one is unpacked first: it starts a window of reads, and the clock starts after it.
            return _Then.apply(out, behind_the_last) * held.pop()

        model = self.models.get(kind)
        if model is not None:
            model.chain = chain
        with under():
            out = model(out) if model is not None else chain(out)
            offload.flush()
            out.backward(torch.zeros_like(out))
        return {
            "cpu_us": 1e6 * clock.cpu_s / count,
            "pack_us": 1e6 * pack_s / count,
            "wall_us": 1e6 * (clock.wall_s - waited_s) / count,
        }

    def _chain(self, under: Callable[[], AbstractContextManager[Any]]) -> dict[str, float]:
        # Filled: untouched memory would be the kernel's single page of zeros.
        held = [torch.ones(_RECORD_OF_CHAIN_BYTES // 4, device=self.device) for _ in range(self.records)]
        out = torch.zeros(1, requires_grad=True, device=self.device) * 1
        begun = time.perf_counter(), time.thread_time(), time.process_time()
        with under():
            while held:
                out = _Saves.apply(out, held.pop())
        out.backward(torch.ones_like(out))
        ended = time.perf_counter(), time.thread_time(), time.process_time()
        clocks = zip(("wall_us", "cpu_us", "process_us"), begun, ended, strict=True)
        return {clock: 1e6 * (to - since) / self.records for clock, since, to in clocks}

    def _tensors(self, kind: str) -> list[Tensor]:
        count = self.count + _WINDOW_TENSORS + 2
        if kind in LIGHT:
            sides = [_WIDTH] * (self.count + 1) + [math.isqrt(_MOVED_BYTES // 4)] * (_WINDOW_TENSORS + 1)
            return [torch.zeros(side, side, device=self.device) for side in reversed(sides)]
        if kind == "weight":
            # A linear layer saves the transposed view of a parameter.
            return [self.model[number % len(self.model)].weight.t() for number in range(count)]
        if kind == "below minimum size":
            return [torch.zeros(16, device=self.device) for _ in range(count)]
        if kind == "further view":
            base = torch.zeros(_WIDTH, _WIDTH, device=self.device)
            return [base.view(-1)[:16] for _ in range(count)]
        return [torch.zeros(_WIDTH, _WIDTH, device=self.device) for _ in range(count)]
