"""Forecast: the plan of a step on a machine that you do not have, and its cost in memory, time and SSD wear."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .._errors import ConfigError
from .._memory.limits import default_window_bytes, read_ahead_bytes
from .._plan.facts import Facts, Link
from .._plan.greedy import decide, make
from .._plan.plan import Plan
from .._text import size
from .hardware import Device, Disk
from .observe import Observed
from .training import Training, training

_DAY_S = 86400.0
# Measured time of a step / forecast, minimum and maximum: for runs on a machine measured before, and for published runs
# on H100 and A100. Both are filed in benchmarks/results/forecast_vm2_202611.md.
ERRORS_HERE, ERRORS_CARD = (1.21, 1.95), (0.95, 1.16)
COMPARED = ("h100", "a100")  # the cards of those runs


@dataclass(frozen=True)
class Forecast:
    """Forecast of a training step.

    Attributes:
        device, disk, shards, optimizer: what it is for.
        budget_given: whether the user set the plan's budget.
        observed: the step.
        training: its memory without saved tensors.
        plan: the decision; its times cover forward and backward.
    """

    device: Device
    disk: Disk | None
    shards: int
    optimizer: str
    budget_given: bool
    observed: Observed
    training: Training
    plan: Plan

    @cached_property
    def ways(self) -> dict[str, Plan]:
        """What each policy makes of the step: nothing, all blocks recompute, all moves, or what the plan says."""
        facts, left_bytes = self.plan.facts, max(0, self.training.left_bytes(self.device))
        nothing: frozenset[int] = frozenset()
        everything = frozenset(range(len(facts.saved)))
        found = {"plain": make(facts, left_bytes, nothing, nothing)}
        if facts.blocks:
            found["checkpointing"] = make(facts, left_bytes, nothing, frozenset(range(len(facts.blocks))))
        if self.disk is not None:
            found["nvme"] = make(facts, left_bytes, everything, nothing)
        if self.device.like_cuda:  # on a CPU, what is saved is in the host's memory already
            link = self.device.link_bytes_per_s
            found["host"] = make(facts_on(self.observed, self.device, link, link), left_bytes, everything, nothing)
        return found | {"auto": self.plan}

    def fits(self, way: Plan) -> bool:
        """Whether the card has memory enough."""
        return way.fits and not self.training.shortage(self.device)

    @property
    def problem(self) -> str:
        """Why the plan does not fit, and what would help; "" if it fits."""
        if shortage := self.training.shortage(self.device):
            return shortage
        if self.plan.fits or self.budget_given:
            return self.plan.shortfall()
        peak = self.plan.predicted.peak
        return (
            f"of {size(self.plan.facts.saved_bytes)} that a step saves, the best plan keeps {size(peak.nbytes)} in "
            f"memory {self.binds()}, {size(self.plan.missing_bytes)} more than {self.device.name} has left. Make batch "
            "or sequence smaller (--find-batch finds the largest), or name a --disk or a card with more memory"
        )

    def step_s(self, plan: Plan) -> float:
        """Time of a step, including the optimizer's."""
        return plan.predicted.step_s + self.training.optimizer_s

    @property
    def errors(self) -> tuple[float, float]:
        """Minimum and maximum of measured time / forecast time."""
        return ERRORS_CARD if self.device.like_cuda else ERRORS_HERE

    def peak_bytes(self, way: Plan) -> int:
        """Peak of the card's memory."""
        return max(self.step_peak_bytes(way), self.optimizer_peak_bytes)

    def step_peak_bytes(self, way: Plan) -> int:
        """Peak in forward and backward."""
        own = self.training
        return own.always + own.gathered + own.work + way.predicted.peak.nbytes

    @property
    def optimizer_peak_bytes(self) -> int:
        """Peak in the optimizer's step."""
        return self.training.always + self.training.optimizer_work

    def binds(self) -> str:
        """Say where in the step memory peaks."""
        return "in the optimizer" if self.optimizer_peak_bytes > self.step_peak_bytes(self.plan) else self.plan.binds()

    @property
    def written_bytes_per_day(self) -> float:
        """Bytes written in a day of continuous steps, by all ranks that share the SSDs."""
        ranks = 1 if self.disk is None else self.disk.ranks
        return ranks * self.plan.predicted.moved_bytes / self.step_s(self.plan) * _DAY_S

    @property
    def years(self) -> float | None:
        """Years until that wears out the SSDs; None if nothing is written."""
        return None if self.disk is None else self.disk.years(self.written_bytes_per_day)

    @cached_property
    def fates(self) -> dict[str, int]:
        """Bytes that a step saves by what becomes of them, with those that are too small to plan."""
        plan, facts = self.plan, self.plan.facts
        recomputed = sum(map(facts.block_bytes, plan.recomputed))
        sent = sum(plan.sends.values()) - sum(plan.inputs.values())  # blocks that recompute save none of these
        return {
            "small": self.observed.small_bytes,
            "kept": facts.saved_bytes - recomputed - sent,
            "moved": sent,
            "recomputed": recomputed,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all figures: bytes, seconds, and fractions."""
        own, plan, facts = self.training, self.plan, self.plan.facts
        return {
            "fits": not self.problem,
            "problem": self.problem,
            "model": self.observed.model,
            "parameters": self.observed.parameters,
            "dtype": self.observed.dtype,
            "batch": self.observed.batch,
            "device": self.device.name,
            "disk": None if self.disk is None else self.disk.name,
            "disk_ranks": None if self.disk is None else self.disk.ranks,
            "shards": self.shards,
            "optimizer": self.optimizer,
            "memory_bytes": {
                "card": self.device.memory_bytes,
                "weights": own.weights,
                "gradients": own.gradients,
                "optimizer": own.states,
                "gathered": own.gathered,
                "work": own.work,
                "optimizer_work": own.optimizer_work,
                "saved": plan.predicted.peak.nbytes,
                "budget": plan.budget_bytes,
                "peak": self.peak_bytes(plan),
                "peak_all_kept": own.weights + own.states + self.observed.plain_bytes,
            },
            "peak_binds": self.binds(),
            "saved_bytes": {"all": sum(self.fates.values()), **self.fates},
            "blocks": len(facts.blocks),
            "blocks_recomputed": len(plan.recomputed),
            "flops": self.observed.flops,
            "tokens": self.observed.tokens,
            "steps": {
                name: {
                    "step_s": self.step_s(way),
                    "peak_bytes": self.peak_bytes(way),
                    "saved_peak_bytes": way.predicted.peak.nbytes,
                    "moved_bytes": way.predicted.moved_bytes,
                    "fits": self.fits(way),
                }
                for name, way in self.ways.items()
            },
            "step_errors": self.errors,
            "written_bytes_per_day": self.written_bytes_per_day,
            "ssd_years": self.years,
            "sources": [self.device.source, *([] if self.disk is None else [self.disk.source])],
        }


def forecast(
    observed: Observed,
    device: Device,
    disk: Disk | None,
    *,
    budget_bytes: int | None = None,
    optimizer: str = "adamw",
    shards: int = 1,
) -> Forecast:
    """Plan a step that was observed on fake tensors.

    Args:
        observed: with times of the same device.
        device, disk: of the machine; without a disk, nothing moves.
        budget_bytes: memory for saved tensors. Default: all free memory.
        optimizer: a name in `OPTIMIZERS`.
        shards: number of cards that share weights, gradients and states.

    Raises:
        ConfigError: the budget is more than the card has left, or the optimizer is unknown.
    """
    own = training(observed, device, optimizer, shards)
    left_bytes = max(0, own.left_bytes(device))
    if budget_bytes is not None and budget_bytes > left_bytes > 0:
        raise ConfigError(
            f"--memory-budget {budget_bytes} is more than the {size(left_bytes)} that {device.name} has left for "
            f"saved tensors: {size(device.memory_bytes)} less {size(own.always + own.gathered)} of weights, gradients "
            f"and optimizer and {size(own.work)} of operator workspace. Give at most that, or none"
        )
    rates = (1.0, 1.0) if disk is None else (disk.write_bytes_per_s, disk.read_bytes_per_s)
    plan = decide(
        facts_on(observed, device, *rates),
        left_bytes if budget_bytes is None else budget_bytes,
        moves=disk is not None,
    )
    return Forecast(device, disk, shards, optimizer, budget_bytes is not None, observed, own, plan)


def facts_on(observed: Observed, device: Device, write: float, read: float) -> Facts:
    """Return the facts that a plan for this card is made from, with what moves going out and back at these rates."""
    largest_bytes = max((each.nbytes for each in observed.saved), default=0)
    window_bytes = default_window_bytes(device.memory_bytes, device.memory_bytes if device.like_cuda else None)
    link = Link(
        min(write, device.link_bytes_per_s),
        min(read, device.link_bytes_per_s),
        # Each byte is read from the card's memory to leave it, and written to it to return; a CPU copies it.
        step_s_per_byte=(2 if device.like_cuda else 4) / device.memory_bytes_per_s,
        in_flight_bytes=window_bytes,
    )
    return Facts(
        observed.saved,
        observed.blocks,
        observed.forward_s,
        observed.backward_s,
        link,
        read_ahead_bytes(window_bytes, largest_bytes),
    )
