"""Write cap: the most bytes that a step may write, by the room for scratch files and by what is left of the day."""

from __future__ import annotations

from .._plan.facts import Cap
from .._text import size
from .._transfer.daily_allowance import Allowance

_ROUNDING_BYTES = 8192  # most by which a write is longer in the file than in memory, which is laid out in blocks


def write_cap(capacity_bytes: int | None, allowance: Allowance, storages: int) -> Cap | None:
    """Return what binds first of a step's writes; None where nothing limits them.

    What is left of the day is not spread over it: nobody knows how long a run will last. Near its end a step is planned
    with less and less.

    Args:
        capacity_bytes: that the store may hold at once; all that a step writes is there at the end of forward.
        allowance: counts what is written in a day.
        storages: that the step saves.
    """
    caps = []
    if capacity_bytes is not None:
        room_bytes = max(0, capacity_bytes - _ROUNDING_BYTES * storages)
        caps.append(Cap(room_bytes, f"scratch files may take {size(capacity_bytes)} (nvme_budget)"))
    if allowance.limit_bytes is not None:
        left_bytes = allowance.left_bytes
        limit = f"max_write_bytes_per_day={size(allowance.limit_bytes)}"
        caps.append(Cap(left_bytes, f"of {limit} {size(left_bytes)} are left until midnight UTC"))
    return min(caps, key=lambda cap: cap.nbytes, default=None)
