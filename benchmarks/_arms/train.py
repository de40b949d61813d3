"""The training arm: one GPT step per turn, measured in seconds, CPU seconds and peak memory over idle."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._processes.resident_memory import host_peak_bytes, peak_bytes, reset_peak, resident_bytes, sampled
from .._processes.serve import Tell
from .._workload.accelerator import module_of, open_device
from .._workload.gpt import GPT
from .._workload.sizes import Model
from .._workload.text import Text, standard_library
from .._workload.tools import gradient_hash, make_state


def set_deterministic() -> None:
    """Use kernels that add in a fixed order, which the hash of gradients needs in every arm.

    Not with `warn_only`: the backward of a GPU's flash attention would still add in any order.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set on the module's type


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of any training arm; sent to its process as JSON."""

    sequence: int
    batch: int
    tier: str | None = None
    """The tier of `offload_context`; None trains without it."""
    device: str = "cpu"
    link_bytes_per_s: float | None = None
    """Bandwidth between a simulated device and the host, each way; None for no limit."""
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `OffloadConfig`."""
    sample_interval_s: float | None = None
    """Interval at which resident memory is sampled; None samples nothing."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options, Model):
    """Options of the arm that trains a GPT."""

    checkpoint: bool = False
    adamw: bool = False
    """Train with AdamW instead of plain SGD, which has no state."""
    learning_rate: float = 0.01
    dtype: str = "float32"


class TrainArm:
    """An arm that trains a GPT on the text; `turn(i)` is the step on batch `i`. Subclasses train other models.

    Options: the fields of `TrainOptions`.
    """

    options_class: type[Options] = TrainOptions

    def __init__(self, raw: Mapping[str, Any], tell: Tell) -> None:
        self.options: Any = self.options_class(**raw)
        self.device = open_device(self.options.device, self.options.link_bytes_per_s)
        self.card = None if self.device.type == "cpu" else module_of(self.device.type)
        self._prepare_torch()
        torch.manual_seed(self.options.seed)
        self.model = self.make_model()
        self.optimizer = self.make_optimizer()
        self.offload = self._enter_context()
        self.idle_bytes: int | None = None
        self.about = {"parameters": sum(p.numel() for p in self.model.parameters()), **self.describe()}

    @cached_property
    def text(self) -> Text:
        return standard_library()

    def make_model(self) -> Any:
        o = self.options
        return GPT(o, checkpoint=o.checkpoint).to(self.device, getattr(torch, o.dtype))

    def make_optimizer(self) -> torch.optim.Optimizer:
        parameters, rate = list(self.model.parameters()), self.options.learning_rate
        if self.options.adamw:
            return make_state(torch.optim.AdamW(parameters, lr=0.0), parameters, rate)
        return torch.optim.SGD(parameters, lr=rate)

    def make_batch(self, index: int) -> tuple[Tensor, ...]:
        """Arguments of the model, which returns the loss."""
        o = self.options
        return self.text.batch(size=o.batch, sequence=o.sequence, seed=o.seed, index=index)

    def describe(self) -> dict[str, Any]:
        """The arm's own part of `about`."""
        return {"text_sha256": self.text.sha256, "text_bytes": len(self.text.data)}

    def turn(self, index: int) -> dict[str, Any]:
        """Take one step; return seconds, CPU seconds of all threads, peak over idle, loss, and the gradients' hash."""
        batch = [tensor.to(self.device) for tensor in self.make_batch(index)]
        if self.idle_bytes is None:
            gc.collect()
            self.idle_bytes = self._resident()
        before = self._counters()
        self._reset_peak()
        interval_s = self.options.sample_interval_s
        with sampled(interval_s) if interval_s else nullcontext([]) as samples:
            begun_cpu_s, begun_s = time.process_time(), time.perf_counter()
            loss = self.step(*batch)
            self._synchronize()
            ended_s, ended_cpu_s = time.perf_counter(), time.process_time()
            peaks = self._peaks()
        answer = {
            "wall_s": ended_s - begun_s,
            "cpu_s": ended_cpu_s - begun_cpu_s,
            "idle_bytes": self.idle_bytes,
            **{name: peak - self.idle_bytes for name, peak in peaks.items()},
            "loss": loss.item(),
            "host_bytes": host_peak_bytes() if self.card else 0,
            "memory": [(at_s - begun_s, size - self.idle_bytes) for at_s, size in samples],
        }
        if self.offload is not None:
            # Backward leaves nothing in flight; this makes sure that no write of this arm runs in the next arm's turn.
            self.offload.flush()
        after = self._counters()
        answer["moved"] = {name: after[name] - before[name] for name in after}
        answer["gradients_sha256"] = gradient_hash(self.model.parameters())
        return answer

    def step(self, *batch: Tensor) -> Tensor:
        """Take the training step that is measured; return the loss, detached."""
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.model(*batch)
        self.turn_to_backward()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.optimizer.step()
        return loss.detach()

    def turn_to_backward(self) -> None:
        """Do what a subclass has to do between forward and backward."""

    def close(self) -> dict[str, Any]:
        """Leave the context and close the offloader; return its final counters."""
        if self.offload is None:
            return {"stats": {}}
        self.offload.__exit__(None, None, None)
        stats = self.offload.stats().asdict()
        self.offload.close()
        return {"stats": {**stats, "last_step": None}}

    def _prepare_torch(self) -> None:
        if self.card:
            set_deterministic()
        else:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))

    def _enter_context(self) -> Any:
        if self.options.tier is None:
            return None
        from tba import offload_context

        return offload_context(self.model, self.options.tier, **self.options.settings).__enter__()

    def _counters(self) -> dict[str, float]:
        """The offloader's counters that only grow; empty for an arm without one."""
        if self.offload is None:
            return {}
        stats = self.offload.stats()
        names = [f.name for f in dataclasses.fields(stats) if f.name.endswith("_bytes") or f.name.endswith("_s")]
        momentary = {"resident_bytes", "staging_peak_bytes", "file_bytes"}
        return {name: getattr(stats, name) for name in names if name not in momentary}

    def _resident(self) -> int:
        return int(self.card.memory_allocated(self.device)) if self.card else resident_bytes()

    def _reset_peak(self) -> None:
        if self.card:
            self.card.synchronize(self.device)
            self.card.reset_peak_memory_stats(self.device)
        else:
            reset_peak()

    def _peaks(self) -> dict[str, int]:
        """The peak of memory; on a device also with blocks that other streams hold, and of all that is reserved."""
        if not self.card:
            return {"peak_bytes": peak_bytes()}
        found = self.card.memory_stats(self.device)
        kinds = {"peak_bytes": "allocated", "active_bytes": "active", "reserved_bytes": "reserved"}
        return {name: int(found[f"{kind}_bytes.all.peak"]) for name, kind in kinds.items()}

    def _synchronize(self) -> None:
        if self.card:
            self.card.synchronize(self.device)
