"""Budgets: each process's share of a node's host memory and disk, as pure functions of recorded facts.

A budget is a node's: where several processes train together (`LOCAL_WORLD_SIZE`, which torchrun sets, says how many on
this node), each gets an equal share of it at first. `_group.node_share` says how many times that it has later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# Half of the memory is left to the program, its data loaders and the page cache; a fifth of the free disk to others.
_CPU_SHARE = 0.5
_NVME_SHARE = 0.8


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Count the processes that share the node's budgets: `LOCAL_WORLD_SIZE`, 1 where that is unset or no count."""
    text = environment.get("LOCAL_WORLD_SIZE", "").strip()
    return max(1, int(text)) if text.isdecimal() else 1


def cpu_budget_bytes(asked_bytes: int | None, total_bytes: int, ranks: int) -> int:
    """Bytes of host memory one process may use: its share of `cpu_budget`, or of half of the memory.

    Args:
        asked_bytes: the setting `cpu_budget`.
        total_bytes: the machine's memory or the cgroup's limit, whichever is less.
        ranks: processes that share the node.
    """
    return (int(total_bytes * _CPU_SHARE) if asked_bytes is None else asked_bytes) // ranks


def nvme_budget_bytes(asked_bytes: int | None, free_bytes: int | None, ranks: int) -> int | None:
    """Bytes of scratch files one process may use: its share of `nvme_budget`, or of 80% of what is free.

    Args:
        asked_bytes: the setting `nvme_budget`.
        free_bytes: free on the file systems of the storage paths; None where they do not say.
        ranks: processes that share the node.

    Returns:
        None, for no cap, where neither the setting nor the file systems say anything.
    """
    if asked_bytes is None:
        if free_bytes is None:
            return None
        asked_bytes = int(free_bytes * _NVME_SHARE)
    return asked_bytes // ranks
