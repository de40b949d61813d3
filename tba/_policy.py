"""Policy: what to do with a saved tensor, as pure functions of recorded facts."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from itertools import product

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


def decide(tier: str, *, on_device: bool, used_at_once: bool, compresses: bool = False) -> tuple[Decision, str]:
    """The decision for a tensor of at least the minimum size, and the reason for what stays.

    `used_at_once`: packed inside a backward that frees its graph, i.e. recomputed by a checkpoint and needed next.
    """
    if used_at_once:
        return KEEP, USED_AT_ONCE
    stays = SHRINK if compresses else KEEP
    if tier == "keep":
        return stays, "tier keep"
    if tier == "cpu" and not on_device:
        return stays, IN_HOST
    return (HOLD, FITS) if tier == "auto" else (SEND, "")


def decisions(tier: str, *, compresses: bool) -> Mapping[tuple[bool, bool], tuple[Decision, str]]:
    """Every answer of `decide`, by (on_device, used_at_once): it is asked for every saved tensor."""
    return {
        (on_device, used_at_once): decide(tier, on_device=on_device, used_at_once=used_at_once, compresses=compresses)
        for on_device, used_at_once in product((False, True), repeat=2)
    }


def range_to_store(begin: int, end: int, storage_bytes: int) -> tuple[int, int]:
    """Which bytes of a storage to move when a view spans `[begin, end)`: all, or little more than a small part."""
    if end - begin >= _WHOLE_SHARE * storage_bytes:
        return 0, storage_bytes
    return begin // _RANGE_ALIGNMENT * _RANGE_ALIGNMENT, end
