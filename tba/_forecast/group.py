"""Group: ranks that train one model, how it is cut among them, and which of them share a node.

Ranks are numbered as a device mesh of (replicas, FSDP, tensor parallelism) numbers them: those of one replica follow
one another, and nodes are filled in turn. Ranks of one replica exchange data in forward, and so decide together; ranks
that have a whole model each do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._errors import ConfigError


@dataclass(frozen=True)
class Group:
    """Ranks of a training.

    Attributes:
        world: their number.
        fsdp: that share the weights, gradients and optimizer states of a part of the model.
        tensor: that share its layers.
        per_node: that share a node; the last node may have fewer.
    """

    world: int = 1
    fsdp: int = 1
    tensor: int = 1
    per_node: int = 1

    @property
    def replica(self) -> int:
        """Ranks that have one copy of the model together."""
        return self.fsdp * self.tensor

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.world // self.replica

    def replica_of(self, rank: int) -> range:
        """Ranks that have a copy of the model with this one."""
        first = rank - rank % self.replica
        return range(first, first + self.replica)

    def sharing_node_of(self, rank: int) -> int:
        """Count the ranks on the node of this one."""
        return min(self.per_node, self.world - rank // self.per_node * self.per_node)

    def __str__(self) -> str:
        """Tell how the model is cut: "16 ranks: 2 replicas x 4 FSDP x 2 tensor"."""
        counts = ((self.replicas, "replicas"), (self.fsdp, "FSDP"), (self.tensor, "tensor"))
        parts = " x ".join(f"{count:,} {what}" for count, what in counts if count > 1)
        return f"{self.world:,} ranks: {parts}" if self.world > 1 else "1 rank"


def group_of(world: int | None, fsdp: int, tensor: int, per_node: int) -> Group:
    """Check what was asked for, and make the group. Raises ConfigError.

    Args:
        world: number of ranks. Default: of one replica, or as many replicas as fill nodes evenly.
        fsdp, tensor, per_node: as in `Group`.
    """
    replica = fsdp * tensor
    if world is None:
        world = math.lcm(replica, per_node)
    if world % replica:
        raise ConfigError(
            f"--world {world} is no multiple of --fsdp {fsdp} times --tp {tensor}, the {replica} ranks that have one "
            f"copy of the model: give --world {max(1, round(world / replica)) * replica}, or other numbers of these"
        )
    if per_node > world:
        raise ConfigError(f"--ranks-per-node {per_node} is more than --world {world}: give at most that")
    return Group(world, fsdp, tensor, per_node)
