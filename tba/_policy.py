"""Policy: what to do with a saved tensor, as pure functions of recorded facts."""

from __future__ import annotations

import enum
from collections.abc import Mapping

# A view of at least this share of its storage takes the whole storage with it: the other views of a fused projection
# (q, k, v side by side) are then found there instead of being written again.
_WHOLE_SHARE = 0.5
# Ranges begin at a multiple of what allocators align to, so that a view has a whole offset within them and comes back
# to an address of the same alignment: matrix kernels are chosen by it (up to 256 bytes), and other kernels, other bits.
_RANGE_ALIGNMENT = 512


# Reasons for which a tensor is kept, as statistics name them.
FITS = "fits in memory"
NOT_WRITTEN = "write failed"
IN_HOST = "already in host memory"
DECLINED = "write allowance of the day used up"
TOO_SMALL = "below min_tensor_bytes"
DERIVED = "made again from others"
USED_AT_ONCE = "recomputed"
WHOLE = "compiled as one graph"


class Decision(enum.Enum):
    """What becomes of a tensor that is neither weight nor duplicate."""

    KEEP = enum.auto()  # stays in memory, never moves
    HOLD = enum.auto()  # stays while memory suffices, moves when it does not
    SEND = enum.auto()  # moves now
    SHRINK = enum.auto()  # stays in memory, in fewer bytes


KEEP, HOLD, SEND, SHRINK = Decision  # read off the class, a member costs ten times as much


def decisions(tier: str, *, compresses: bool) -> Mapping[tuple[bool, bool], tuple[Decision, str]]:
    """The decision for a tensor of at least the minimum size and, for what stays, the reason.

    By (on_device, used_at_once), as a table, because it is looked up for every saved tensor. Used at once is what a
    backward that frees its graph packs: a checkpoint recomputes it and needs it next.
    """
    stays = SHRINK if compresses else KEEP
    by_tier = {"keep": (stays, "tier keep"), "auto": (HOLD, FITS)}
    found = by_tier.get(tier, (SEND, ""))
    on_host = (stays, IN_HOST) if tier == "cpu" else found
    at_once = KEEP, USED_AT_ONCE
    return {(False, False): on_host, (True, False): found, (False, True): at_once, (True, True): at_once}


def range_to_store(begin: int, end: int, storage_bytes: int) -> tuple[int, int]:
    """Which bytes of a storage to move when a view spans `[begin, end)`: all, or little more than a small part."""
    if end - begin >= _WHOLE_SHARE * storage_bytes:
        return 0, storage_bytes
    return begin // _RANGE_ALIGNMENT * _RANGE_ALIGNMENT, end
