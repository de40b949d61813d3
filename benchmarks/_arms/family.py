"""The family arm: trains a model of one of five families: plain, offloaded, planned or checkpointed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor

from .._peers.registry import put_under
from .._workload.families import BY_SIZE, Family
from .._workload.gpt import GPT, GPTConfig
from .train import Options, TrainArm, set_deterministic

# Number of steps over which predictions are compared with measurements.
_LAST = 16
# Steps that compile: the first, and one after it, when tba may have seen what the first saved.
_COMPILING = 2


@dataclass(frozen=True, kw_only=True)
class FamilyOptions(Options):
    """Options of these arms.

    Attributes:
        family: a key of `FAMILIES`.
        size: a key of `BY_SIZE`.
        dtype: of weights and activations.
        checkpoint: recompute every block, by the model library's own checkpointing.
        peer: a key of `PEERS` to train under.
        batch: examples of a batch; 0: the family's own.
        layers: of the model; None: the family's own number.
        compiled: PyTorch's `activation_memory_budget`, under which the whole model is compiled; None: it is not.
        scratch: a folder for what a peer writes.
    """

    sequence: int = 0
    batch: int = 0
    family: str
    size: str = "small"
    dtype: str = "float32"
    checkpoint: bool = False
    peer: str = ""
    layers: int | None = None
    compiled: float | None = None
    scratch: str = ""


class FamilyArm(TrainArm):
    """A `TrainArm` of one family. Its `moved` also has what the plan predicted and what was measured."""

    options_class = FamilyOptions

    def _prepare_torch(self) -> None:
        super()._prepare_torch()
        if self.options.compiled is not None:  # compiled code of the CPU's adds up an embedding's gradient in any order
            set_deterministic()

    @cached_property
    def family(self) -> Family:
        return BY_SIZE[self.options.size][self.options.family]

    @cached_property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.options.dtype)
        return found

    def make_model(self) -> Any:
        o = self.options
        with self.device:  # making a large one on the CPU is slow
            model = self.family.make(o.checkpoint, o.layers)
        model = model.to(self.device, self.dtype)
        if o.peer:
            put_under(o.peer, model, Path(o.scratch))
        if o.compiled is not None:
            functorch.activation_memory_budget = o.compiled
            model.compile()
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.01)

    def make_batch(self, index: int) -> tuple[Tensor, ...]:
        batch = self.family.batch(index, self.options.batch or self.family.examples)
        return tuple(part.to(self.dtype) if part.is_floating_point() else part for part in batch)

    def step(self, *batch: Tensor) -> Tensor:
        torch.manual_seed(0)  # dropout draws equal masks in every arm
        return super().step(*batch)

    def describe(self) -> dict[str, Any]:
        if self.options.settings.get("compress") is not None:
            _compile_kernels(self.options.settings["compress"], self.device, self.dtype)
        self._predicted: tuple[float, int] | None = None
        self._step_ratios: list[float] = []
        self._peak_ratios: list[float] = []
        self._held_bytes = 0
        if self.options.compiled is not None:  # what compiling takes counts as idle, and not in a step's peak
            for index in range(_COMPILING):
                self.step(*(part.to(self.device) for part in self.make_batch(index)))
        return {
            "family": self.family.describe,
            "unit": self.family.unit,
            "units": self.family.units(self.make_batch(0)),
            "inexact": self.options.settings.get("compress") not in (None, "exact"),
        }

    def turn(self, index: int) -> dict[str, Any]:
        answer = super().turn(index)
        if self.offload is None:
            return answer
        budget_bytes = self.options.settings.get("memory_budget")
        if self.options.compiled is not None and budget_bytes is not None:  # a graph is planned when it is compiled
            self._held_bytes = max(self._held_bytes, self.offload.stats().step_peak_bytes)
            answer["moved"] |= {"budget_bytes": budget_bytes, "held_bytes_by_plan": self._held_bytes}
            return answer
        plan = self.offload.plan
        if not plan:
            return answer
        if plan.measured is not None and self._predicted is not None:
            # `measured` is the step before: the engine sees a step's end when the next one begins.
            step_s, peak_bytes = self._predicted
            self._step_ratios.append(step_s / plan.measured.step_s)
            self._peak_ratios.append(peak_bytes / plan.measured.peak_bytes)
            self._held_bytes = max(self._held_bytes, plan.measured.peak_bytes)
        self._predicted = plan.predicted.step_s, plan.predicted.held_bytes
        answer["moved"] |= {
            "budget_bytes": plan.budget_bytes,
            "blocks": len(plan.facts.blocks),
            "recomputed": len(plan.recomputed),
            "moved_share": sum(plan.sends.values()) / max(1, plan.facts.saved_bytes),
        }
        if self._step_ratios:
            answer["moved"] |= {
                "held_bytes_by_plan": self._held_bytes,
                "predicted_step": median(self._step_ratios[-_LAST:]),
                "predicted_peak": median(self._peak_ratios[-_LAST:]),
            }
        return answer


def _compile_kernels(preset: str, device: torch.device, dtype: torch.dtype) -> None:
    """Compile the codecs' kernels in a step of a tiny model, so that they count as idle and not in a step's peak."""
    from tba import OffloadConfig, Offloader

    model = GPT(GPTConfig(layers=1, width=64, heads=2, sequence=64)).to(device, dtype)
    tokens = torch.zeros(2, 64, dtype=torch.long, device=device)
    config = OffloadConfig(tier="keep", compress=preset, min_tensor_bytes=0)
    with Offloader(model, config) as offload:
        model(tokens, tokens).backward()
    offload.close()
