"""Limits: how many bytes may be in flight, held back, read ahead and kept in memory, as pure functions."""

from __future__ import annotations

from dataclasses import dataclass

# How much goes out, or comes back, at once where memory has room for it.
_WRITE_BURST_BYTES = 8 << 20
_READ_BURST_BYTES = 4 << 20
# A host with so many cores has some to spare for moving bytes while it computes.
_MANY_CORES = 8
_LEAST_WINDOW_BYTES = 24 << 20  # by default, on a host


def hold_budget_bytes(held_bytes: int, free_bytes: int, reserve_bytes: int) -> int:
    """How much may be held in memory, given what is held and what is still free, leaving `reserve_bytes` free."""
    return max(0, held_bytes + free_bytes - reserve_bytes)


def write_burst_bytes(budget_bytes: int, staging_bytes: int) -> int:
    """How far below a budget to go at once, by writing: a worker that is woken for each tensor costs more than it.

    Half of what may be in flight at most: else the step would wait for room, with time enough until the next burst.
    """
    return min(_WRITE_BURST_BYTES, budget_bytes // 2, staging_bytes // 2)


def read_burst_bytes(budget_bytes: int) -> int:
    """How much of a budget is to be free before it is filled by reading. Less than for writes: backward may wait."""
    return min(_READ_BURST_BYTES, budget_bytes // 4)


def io_threads(asked: int | None, *, on_device: bool, cores: int) -> int:
    """Workers per storage path: as many as asked for. Else two, which keep a drive busy.

    But one where the tensors are on a host of few cores: whatever runs beside the step there takes a core from it, and
    two workers also wait for one another.
    """
    if asked is not None:
        return asked
    return 2 if on_device or cores >= _MANY_CORES else 1


def read_ahead_bytes(window_bytes: int, largest_bytes: int) -> int:
    """How much of the window to fill by reading: two of the largest tensors, at least half of it.

    What was held back at the turn to backward is used up first. Later, when gradients have grown, memory is scarcer.
    """
    return min(window_bytes, max(window_bytes // 2, 2 * largest_bytes))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds the engine: bytes in flight to the tier, of the window, and to leave free; seconds to wait.

    The window is what is held back from writing and read ahead: at least and at most so much (`window_bytes`).
    """

    staging_bytes: int
    least_window_bytes: int
    window_bytes: int
    reserve_bytes: int
    timeout_s: float


def window_bytes(limits: Limits, largest_bytes: int) -> int:
    """How much to hold back from writing and read ahead where the largest tensor has so many bytes.

    Three of the largest: one in use, one arriving, one to come. Measured on 2 cores: with 24 MiB a step with tensors of
    8 MiB takes no longer than with 40 MiB, and 16 MiB less memory; one with tensors of 16 MiB begins to wait.
    """
    return min(limits.window_bytes, max(limits.least_window_bytes, 3 * largest_bytes))


def limits(
    staging_bytes: int | None,
    window_bytes: int | None,
    timeout_s: float,
    total_bytes: int,
    device_bytes: int | None = None,
) -> Limits:
    """The limits where a setting is None its default, for a machine (or cgroup) with this much memory.

    `device_bytes`: memory of the device that computes; None where the host does.
    """
    default = default_window_bytes(total_bytes, device_bytes)
    staging_bytes = default if staging_bytes is None else staging_bytes
    if window_bytes is not None:
        least_window_bytes = window_bytes
    else:
        window_bytes = default
        least_window_bytes = default if device_bytes is not None else min(default, _LEAST_WINDOW_BYTES)
    return Limits(
        staging_bytes=staging_bytes,
        least_window_bytes=least_window_bytes,
        window_bytes=window_bytes,
        # Room for what is in flight both ways, and a sixteenth for everything that is not a saved tensor.
        reserve_bytes=staging_bytes + window_bytes + total_bytes // 16,
        timeout_s=timeout_s,
    )


def default_window_bytes(total_bytes: int, device_bytes: int | None = None) -> int:
    """Default of the most that is held back from writing and read ahead. A few of the largest tensors of a layer,
    bounded by memory.

    On a host, at 2 GB/s, this is some 20 ms of transfer: far above a transfer's latency, far below a step. A device
    has larger tensors and is done with them sooner: as many milliseconds at 50 GB/s.
    """
    if device_bytes is None:
        return max(4 << 20, min(40 << 20, total_bytes // 16))
    return max(4 << 20, min(1 << 30, total_bytes // 16, device_bytes // 16))
