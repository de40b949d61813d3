"""Limits: bytes that may be in flight, held back, read ahead and kept in memory, as pure functions."""

from __future__ import annotations

from dataclasses import dataclass

# A host with at least this many cores has some to spare for moving bytes while it computes.
_MANY_CORES = 8
_LEAST_WINDOW_BYTES = 24 << 20  # by default, on a host


def hold_budget_bytes(held_bytes: int, free_bytes: int, reserve_bytes: int) -> int:
    """Bytes that may be held in memory, given those held and those still free, so that `reserve_bytes` stay free."""
    return max(0, held_bytes + free_bytes - reserve_bytes)


def io_threads(asked: int | None, *, on_device: bool, cores: int) -> int:
    """Workers per storage path: as many as asked for, by default two, which keep a drive busy.

    One by default if the tensors are on a host of few cores: there a worker takes a core from the step, and two workers
    also wait for one another.
    """
    if asked is not None:
        return asked
    return 2 if on_device or cores >= _MANY_CORES else 1


def read_ahead_bytes(window_bytes: int, largest_bytes: int) -> int:
    """Bytes of the window to fill by reading: two of the largest tensors, at least half of the window.

    Tensors held back at the turn to backward are used first. Later, when gradients have grown, memory is scarcer.
    """
    return min(window_bytes, max(window_bytes // 2, 2 * largest_bytes))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the engine.

    Attributes:
        staging_bytes: most bytes in flight to the tier.
        least_window_bytes, window_bytes: least and most bytes held back from writing or read ahead (the window).
        reserve_bytes: to leave free.
        timeout_s: longest wait for a transfer.
    """

    staging_bytes: int
    least_window_bytes: int
    window_bytes: int
    reserve_bytes: int
    timeout_s: float


def window_bytes(limits: Limits, largest_bytes: int) -> int:
    """Bytes to hold back from writing and to read ahead, given the size of the largest tensor.

    Three of the largest: one in use, one arriving, one to come. Measured on 2 cores: with 24 MiB a step with tensors of
    8 MiB takes no longer than with 40 MiB, and 16 MiB less memory; a step with tensors of 16 MiB begins to wait.
    """
    return min(limits.window_bytes, max(limits.least_window_bytes, 3 * largest_bytes))


def limits(
    staging_bytes: int | None,
    window_bytes: int | None,
    timeout_s: float,
    total_bytes: int,
    device_bytes: int | None = None,
) -> Limits:
    """Make the limits from settings (None: the default) and the memory of the machine or cgroup.

    Args:
        staging_bytes, window_bytes, timeout_s: settings.
        total_bytes: memory of the machine or cgroup.
        device_bytes: memory of the device that computes; None if the host does.
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


def device_reserve_bytes(limits: Limits, total_bytes: int, transient_bytes: int | None) -> int:
    """Bytes to leave free on a device: for what is in flight both ways, and for what operators make and drop.

    Args:
        limits: of the engine.
        total_bytes: the device's memory.
        transient_bytes: what operators took in steps that were seen; None before the first.
    """
    rest_bytes = total_bytes // 16 if transient_bytes is None else max(total_bytes // 64, transient_bytes)
    return limits.staging_bytes + limits.window_bytes + rest_bytes


def default_window_bytes(total_bytes: int, device_bytes: int | None = None) -> int:
    """Default of the most bytes to hold back from writing and to read ahead: a few of the largest tensors of a layer.

    On a host, at 2 GB/s, this is about 20 ms of transfer: far above a transfer's latency, far below a step. A device
    has larger tensors and uses them up sooner: there it is as many milliseconds at 50 GB/s.
    """
    if device_bytes is None:
        return max(4 << 20, min(40 << 20, total_bytes // 16))
    return max(4 << 20, min(1 << 30, total_bytes // 16, device_bytes // 16))
