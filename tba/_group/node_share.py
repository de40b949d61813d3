"""Node share: the part of a node's host memory, disk and daily writes that each of its ranks may take, by need.

A share is in equal parts: 1 is what a rank has where the node's budget is divided equally. A rank's need is the most
that a step of its has wanted to move. Three quarters of the budget go by need and one quarter equally, so that a rank
whose steps suddenly need more still has something until the others have made room.

Ranks know each other's needs by two sums in the job's store, and tell what they have beyond equal parts in a third. A
rank that gives something up takes less first, and subtracts it there when another step has ended, in which memory and
blocks were given back. A rank that takes more adds it first, and keeps only that by which the sum does not exceed 0.
Addition in the store is atomic.

Guarantees:

1. The shares of a node's ranks never add up to more than their number.
2. They are 1 until all ranks of the node have told what they need.
3. Nobody waits for another rank, but for the store's answer. A rank that has died leaves its share unused. If the store
   fails, shares stay as they are.
4. The store is looked at after the first steps, then ever more seldom, and when this rank needs clearly more or has
   something to give.

Assumptions: `LOCAL_WORLD_SIZE` ranks of the job run on this node, and each makes its Offloaders in the same order.
"""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path
from typing import Any

from .._torch.private import job_store

_EQUALLY = 0.25  # of the budget; the rest by need
_UNIT = 1 << 20  # of a share, in the store's sum
_NEED_UNIT_BYTES = 1 << 10  # of what is needed, there
_CLEARLY = 1.125  # times as much as before
_OFTEN, _SELDOM = 8, 64  # steps
_counts: Counter[str] = Counter()  # shares in this process


class NodeShare:
    """One rank's share.

    Args:
        ranks: of the job on this node.

    Attributes:
        share: in equal parts.
    """

    def __init__(self, ranks: int) -> None:
        self.share = 1.0
        self._ranks, self._steps = ranks, 0
        self._need = self._told = 0
        self._more = 0  # than an equal part, in the store's unit
        self._to_give = 0  # of it, not subtracted in the store yet
        self._name: str | None = None
        if ranks > 1:
            _counts["shares"] += 1
            self._name = f"tba/node/{_node()}/{_counts['shares']}"

    def take(self, need_bytes: int) -> float:
        """Return the share from now on, where a step ends; `need_bytes`: that one before it has wanted to move."""
        if self._name is None:
            return self.share
        self._steps += 1
        self._need = max(self._need, need_bytes // _NEED_UNIT_BYTES, 1)
        steps = self._steps
        due = steps <= _OFTEN or not steps & (steps - 1) or not steps % _SELDOM
        due = due or bool(self._to_give) or self._need > _CLEARLY * self._told
        if due and (found := job_store(self._name)) is not None:
            try:
                self._settle(found[0])
            except RuntimeError:  # the job ends: its store is gone
                self._name = None
        return self.share

    def _settle(self, store: Any) -> None:
        if self._to_give:
            given, self._to_give = self._to_give, 0
            store.add("more", -given)
        known = store.add("known", int(not self._told))
        total = store.add("need", self._need - self._told)
        self._told = self._need
        target = share_of(self._need, total, self._ranks) if known == self._ranks else 1.0
        more = int((target - 1) * _UNIT) - self._more
        if more < 0:
            self._change(more)
            self._to_give = -more
        elif more > 0:
            excess = min(more, max(0, store.add("more", more)))
            if excess:
                store.add("more", -excess)
            self._change(more - excess)

    def _change(self, more: int) -> None:
        self._more += more
        self.share = 1 + self._more / _UNIT


def share_of(need: int, total: int, ranks: int) -> float:
    """Return the share of a rank that needs so much of what all so many `ranks` need in `total`. Pure."""
    return _EQUALLY + (1 - _EQUALLY) * ranks * need / total


def _node() -> str:
    """Name the machine, and the container: ranks in another have budgets of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"
