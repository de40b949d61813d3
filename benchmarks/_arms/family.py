"""The family arm: trains a model of one of five families, plain, offloaded, by plan or checkpointed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._workload.families import FAMILIES
from .train import Options, TrainArm


@dataclass(frozen=True, kw_only=True)
class FamilyOptions(Options):
    """Options of these arms.

    Attributes:
        family: a key of `FAMILIES`.
        checkpoint: recompute every block.
    """

    sequence: int = 0
    batch: int = 0
    family: str
    checkpoint: bool = False


class FamilyArm(TrainArm):
    """A `TrainArm` of one family. What a plan predicts and what came of it is among the bytes moved."""

    options_class = FamilyOptions

    def make_model(self) -> Any:
        return FAMILIES[self.options.family].make(self.options.checkpoint)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.01)

    def make_batch(self, index: int) -> tuple[Tensor, ...]:
        return FAMILIES[self.options.family].batch(index)

    def step(self, *batch: Tensor) -> Tensor:
        torch.manual_seed(0)  # dropout draws equal masks in every arm
        return super().step(*batch)

    def describe(self) -> dict[str, Any]:
        return {"family": FAMILIES[self.options.family].describe}

    def turn(self, index: int) -> dict[str, Any]:
        answer = super().turn(index)
        plan = None if self.offload is None else self.offload.plan
        if plan is not None:
            answer["moved"] |= {
                "budget_bytes": plan.budget_bytes,
                "blocks": len(plan.facts.blocks),
                "recomputed": len(plan.recomputed),
                "moved_share": sum(plan.sends.values()) / max(1, plan.facts.saved_bytes),
                "predicted_peak_bytes": plan.predicted.peak.nbytes,
                "predicted_step_s": plan.predicted.step_s,
            }
            if plan.measured is not None:
                answer["moved"] |= {
                    "measured_peak_bytes": plan.measured.peak_bytes,
                    "measured_step_s": plan.measured.step_s,
                }
        return answer
