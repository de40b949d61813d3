"""Together: the forecast of a group of ranks, who decide as ranks of a job do.

Ranks that exchange data in forward decide once which blocks recompute, for the hardest step among them
(`tba._group.decision`), and each decides alone what it moves. Ranks that exchange nothing there plan alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from .._group.decision import Share, decide_together
from .._plan.facts import Facts
from .._plan.greedy import decide_moves, make
from .forecast import Forecast, forecast
from .group import Group
from .hardware import Device, Disk
from .observe import Observed


@dataclass(frozen=True)
class Alike:
    """Ranks with one forecast.

    Attributes:
        ranks: their numbers, in order.
        forecast: of each of them.
    """

    ranks: tuple[int, ...]
    forecast: Forecast

    def to_dict(self) -> dict[str, Any]:
        """Return what each of them keeps, moves and recomputes, and what a step takes: bytes and seconds."""
        found, plan = self.forecast, self.forecast.plan
        return {
            "ranks": self.ranks,
            "budget_bytes": plan.budget_bytes,
            **{f"{what}_bytes": nbytes for what, nbytes in found.fates.items()},
            "blocks_recomputed": len(plan.recomputed),
            "peak_bytes": found.peak_bytes(plan),
            "step_s": found.step_s(plan),
            "fits": not found.problem,
            "decided": plan.agreed or "alone",
        }


@dataclass(frozen=True)
class Together:
    """Forecast of a group.

    Attributes:
        group: of ranks.
        alike: ranks with one forecast each, those with the first rank first.
    """

    group: Group
    alike: tuple[Alike, ...]

    @property
    def hardest(self) -> Forecast:
        """That of the first rank: its node is full, so no other has less memory or a slower disk."""
        return self.alike[0].forecast

    @property
    def step_s(self) -> float:
        """Time of a step, in which ranks wait for the slowest."""
        return max(each.forecast.step_s(each.forecast.plan) for each in self.alike)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that all ranks train on in a second. Ranks that share layers share a batch."""
        return self.hardest.observed.tokens * self.group.world / self.group.tensor / self.step_s

    def to_dict(self) -> dict[str, Any]:
        """Return all figures: those of the first rank, and of the others what differs."""
        group = self.group
        return self.hardest.to_dict() | {
            "world": group.world,
            "replicas": group.replicas,
            "tensor": group.tensor,
            "ranks_per_node": group.per_node,
            "tokens_per_s": self.tokens_per_s,
            "ranks": [each.to_dict() for each in self.alike],
        }


def forecast_together(
    observed: Observed,
    device: Device,
    disk: Disk | None,
    group: Group,
    *,
    budget_bytes: int | None = None,
    optimizer: str = "adamw",
) -> Together:
    """Plan the step of each rank of a group.

    Args:
        observed: the step of one rank, whose layers are cut among `group.tensor` ranks.
        device, disk: of a node; its ranks share the disk, and the memory if it is a CPU.
        group: of ranks, all with the same batch shape.
        budget_bytes: memory for saved tensors, of each rank. Default: all free memory.
        optimizer: a name in `OPTIMIZERS`.

    Raises:
        ConfigError: as `forecast` does.
    """

    @cache
    def alone(sharing: int) -> Forecast:
        drives = None if disk is None else disk.shared(sharing)
        return forecast(
            observed, device.shared(sharing), drives, budget_bytes=budget_bytes, optimizer=optimizer, shards=group.fsdp
        )

    found: dict[tuple[int, ...], dict[int, Forecast]] = {}  # by what the nodes of a replica's ranks are shared by
    alike: dict[tuple[frozenset[int], int], Alike] = {}
    for first in range(0, group.world, group.replica):
        ranks = group.replica_of(first)
        sharing = tuple(map(group.sharing_node_of, ranks))
        if sharing not in found:
            found[sharing] = _agreed(ranks, {each: alone(each) for each in sharing}, sharing)
        for rank, each in zip(ranks, sharing, strict=True):
            one = found[sharing][each]
            key = (one.plan.recomputed, each)
            alike[key] = Alike((*alike[key].ranks, rank), alike[key].forecast) if key in alike else Alike((rank,), one)
    return Together(group, tuple(alike.values()))


def _agreed(ranks: range, alone: Mapping[int, Forecast], sharing: tuple[int, ...]) -> dict[int, Forecast]:
    """Decide as the ranks of a replica do, given their forecasts alone, by how many share a node."""
    if len(ranks) == 1:
        return dict(alone)
    moves = alone[sharing[0]].disk is not None
    plans = {each: found.plan for each, found in alone.items()}
    shares = [Share(plan.facts, plan.budget_bytes, _all_blocks(plan.facts)) for plan in map(plans.__getitem__, sharing)]
    decision = decide_together(ranks, shares, moves=moves)
    assert decision is not None  # all have one step
    again, nothing = decision.recomputed, frozenset[int]()
    found: dict[int, Forecast] = {}
    for each, plan in plans.items():
        facts, budget_bytes = plan.facts, plan.budget_bytes
        own = decide_moves(facts, budget_bytes, again) if moves else make(facts, budget_bytes, nothing, again)
        found[each] = replace(alone[each], plan=replace(own, agreed=decision.told))
    return found


def _all_blocks(facts: Facts) -> frozenset[int]:
    """All gather weights in forward, or sum over ranks."""
    return frozenset(range(len(facts.blocks)))
