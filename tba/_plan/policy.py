"""Policy: decides what to do with a saved tensor, as pure functions of recorded facts."""

from __future__ import annotations

import enum
from collections.abc import Mapping

# A view of at least this share of its storage moves together with the whole storage: the other views of a fused
# projection (q, k, v side by side) are then found there instead of being written again.
_WHOLE_SHARE = 0.5
# Ranges begin at a multiple of the allocators' alignment, so that a view has a whole offset in them and comes back to
# an address of equal alignment: matrix kernels are chosen by it (up to 256 bytes), and another kernel gives other bits.
_RANGE_ALIGNMENT = 512
# Bytes written, or read, at once if memory has room for them.
_WRITE_BURST_BYTES = 8 << 20
_READ_BURST_BYTES = 4 << 20
# A plan's writes go in this many portions: larger ones start late on a slow link, and keep memory longer than planned.
_PLAN_BURSTS = 16
# Portions of a small plan are larger, as a worker that wakes for each tensor costs more than it moves: up to so many
# bytes, a share of the plan or budget, and what the link carries in so many seconds (it is idle until then).
_LEAST_BURST_BYTES, _LEAST_BURSTS, _BURST_S = 4 << 20, 4, 2e-3


# Reasons for keeping a tensor in memory, as statistics name them.
FITS = "fits in memory"
NOT_WRITTEN = "write failed"
TIER_KEEP = "tier keep"
IN_HOST = "already in host memory"
DECLINED = "write allowance of the day used up"
TOO_SMALL = "below min_tensor_bytes"
DERIVED = "made again from others"
USED_AT_ONCE = "recomputed"
WHOLE = "compiled as one graph"
ASIDE = "saved in the midst of a hook"


class Decision(enum.Enum):
    """Decision on a tensor that is neither a weight nor saved already."""

    KEEP = enum.auto()  # stays in memory, never moves
    HOLD = enum.auto()  # stays while memory suffices, moves when it does not
    SEND = enum.auto()  # moves now
    SHRINK = enum.auto()  # stays in memory, in fewer bytes


KEEP, HOLD, SEND, SHRINK = Decision  # as names of the module: looking up `Decision.KEEP` takes ten times as long


def decisions(tier: str, *, compresses: bool) -> Mapping[tuple[bool, bool], tuple[Decision, str]]:
    """Tabulate decisions on tensors of at least the minimum size, with reasons for those that stay.

    The keys are (on_device, used_at_once). It is a table because a decision is looked up for every saved tensor. A
    tensor is used at once if it is packed within a backward that frees its graph: a checkpoint has recomputed it.
    """
    stays = SHRINK if compresses else KEEP
    by_tier = {"keep": (stays, TIER_KEEP), "auto": (HOLD, FITS)}
    found = by_tier.get(tier, (SEND, ""))
    on_host = (stays, IN_HOST) if tier == "cpu" else found
    at_once = KEEP, USED_AT_ONCE
    return {(False, False): on_host, (True, False): found, (False, True): at_once, (True, True): at_once}


def range_to_store(begin: int, end: int, storage_bytes: int) -> tuple[int, int]:
    """Return the range of a storage to move with a view that spans `[begin, end)`: all of it, or hardly more."""
    if end - begin >= _WHOLE_SHARE * storage_bytes:
        return 0, storage_bytes
    return begin // _RANGE_ALIGNMENT * _RANGE_ALIGNMENT, end


def write_burst_bytes(budget_bytes: int, staging_bytes: int) -> int:
    """Bytes to write at once when a budget is exceeded: waking a worker for each tensor costs more than its write.

    At most half of the bytes that may be in flight, as with more the step would wait for room.
    """
    return min(_WRITE_BURST_BYTES, budget_bytes // 2, staging_bytes // 2)


def read_burst_bytes(budget_bytes: int) -> int:
    """Bytes of a budget that must be free before more is read. Fewer than for writes, because backward may wait."""
    return min(_READ_BURST_BYTES, budget_bytes // 4)


def planned_burst_bytes(budget_bytes: int, plan_bytes: int, staging_bytes: int, link_bytes_per_s: float) -> int:
    """Bytes of what goes by a plan, `plan_bytes` in all, to write at once to a link of this bandwidth."""
    most_bytes = min(plan_bytes, budget_bytes)
    least_bytes = min(_LEAST_BURST_BYTES, most_bytes // _LEAST_BURSTS, int(_BURST_S * link_bytes_per_s))
    return min(write_burst_bytes(budget_bytes, staging_bytes), max(most_bytes // _PLAN_BURSTS, least_bytes))
