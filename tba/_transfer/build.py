"""Opening: makes what the settings ask for: the store, and the mover with its limits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from io_backends import HostStore, KvikioStore, PosixStore, Store, StripedStore, TwoLevelStore

from .._config import OffloadConfig
from .._device import memory as device_memory
from .._errors import ConfigError
from .._group.node_share import NodeShare
from .._memory import allocator, budgets, free_memory
from .._memory import limits as _limits
from .._memory.host_pools import HostMemory
from .._stats import Counters
from .daily_allowance import Allowance
from .measured import backend_for
from .mover import Mover
from .scratch_paths import Directory, free_disk_bytes, storage_directories

_POSIX_ONLY = ("checksum", "max_write_rate", "max_read_rate")


def directories(config: OffloadConfig) -> tuple[Directory, ...]:
    """Find where scratch files go (none for tiers without any), so that a wrong path fails now, not in the first step.

    Raises:
        ConfigError: settings that conflict.
        StorageError: the storage path cannot be used.
    """
    for name in _POSIX_ONLY if config.io_backend == "kvikio" else ():
        if getattr(config, name):
            raise ConfigError(f"{name} was asked for with io_backend 'kvikio', which has none; use io_backend 'posix'")
    return storage_directories(config) if config.tier in ("nvme", "auto") else ()


def open_store(config: OffloadConfig, directories: Sequence[Directory], on_device: bool) -> Store:
    """Make the store for a tier, without any file or thread; the first transfer makes those.

    Args:
        config: the settings.
        directories: where scratch files go; none for tier "cpu".
        on_device: what is saved is on a device. Tier "auto" then fills host memory before it writes to disk.

    Raises:
        StoreError: the requested backend cannot be used here.
    """
    if not directories:
        return HostStore(budget_bytes=cpu_budget_bytes(config), timeout_s=config.io_timeout)
    free_bytes = free_disk_bytes([directory.path for directory in directories])
    capacity = budgets.nvme_budget_bytes(config.nvme_budget, free_bytes, budgets.local_ranks(os.environ))
    share = None if capacity is None else capacity // len(directories)
    threads = io_threads(config, on_device=on_device)
    stores: list[Store] = [
        _open_file(config, directory, threads, share, len(directories), on_device=on_device)
        for directory in directories
    ]
    store = stores[0] if len(stores) == 1 else StripedStore(stores)
    if config.tier == "auto" and on_device:
        host = HostStore(timeout_s=config.io_timeout)
        return TwoLevelStore(host, store, host_shares(config).kept_bytes, timeout_s=config.io_timeout)
    return store


def make_mover(
    config: OffloadConfig,
    model: nn.Module | None,
    lock: threading.RLock,
    counters: Counters,
    open_store: Callable[[bool], Store],
    node: NodeShare | None = None,
) -> Mover:
    """Make a mover within the limits of the settings, this machine, and the devices that the model is on.

    `node`: this rank's share of what the node has; None for a new one.
    """
    limits = _limits.limits(
        config.staging_bytes,
        config.prefetch_bytes,
        config.io_timeout,
        free_memory.total_bytes(),
        device_memory.least_total_bytes(model),
    )
    # Tier "cpu" writes to no drive.
    ranks = budgets.local_ranks(os.environ)
    allowance = Allowance(None if config.tier == "cpu" else config.max_write_bytes_per_day, ranks=ranks)
    # Memory kept for future transfers also stays within what the settings allow these to take.
    idle_bytes = limits.staging_bytes + limits.window_bytes
    memory = HostMemory(cpu_budget_bytes(config), idle_bytes, in_heap=allocator.keeps_pages())
    shares = host_shares(config)
    staged_bytes = shares.queued_bytes if config.tier == "auto" else shares.kept_bytes
    return Mover(lock, counters, open_store, limits, memory, allowance, staged_bytes, node or NodeShare(ranks))


def io_threads(config: OffloadConfig, *, on_device: bool) -> int:
    """Workers per storage path, on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _limits.io_threads(config.io_threads, on_device=on_device, cores=cores)


def cpu_budget_bytes(config: OffloadConfig) -> int:
    return budgets.cpu_budget_bytes(config.cpu_budget, free_memory.total_bytes(), budgets.local_ranks(os.environ))


class HostShares(NamedTuple):
    """Shares of the budget for host memory, of what a device offloads under tier "auto".

    Attributes:
        kept_bytes: of what stays there.
        queued_bytes: of what waits to be written to disk. The rest is for copies back, through the same pinned memory.
    """

    kept_bytes: int
    queued_bytes: int


def host_shares(config: OffloadConfig) -> HostShares:
    """Divide the budget for host memory."""
    budget_bytes = cpu_budget_bytes(config)
    return HostShares(budget_bytes * 3 // 4, budget_bytes // 8)


def _open_file(
    config: OffloadConfig,
    directory: Directory,
    threads: int,
    capacity_bytes: int | None,
    count: int,
    *,
    on_device: bool,
) -> Store:
    backend = config.io_backend
    if backend == "auto" and on_device and not any(getattr(config, name) for name in _POSIX_ONLY):
        backend = backend_for(directory.path)
    if backend == "kvikio":
        return KvikioStore(
            directory.path,
            threads=threads,
            capacity_bytes=capacity_bytes,
            timeout_s=config.io_timeout,
            device=directory.device,
        )
    return PosixStore(
        directory.path,
        threads=threads,
        checksum=config.checksum,
        capacity_bytes=capacity_bytes,
        # The limits hold for the process: each of several paths gets its share.
        write_rate_bytes_per_s=None if config.max_write_rate is None else config.max_write_rate / count,
        read_rate_bytes_per_s=None if config.max_read_rate is None else config.max_read_rate / count,
        timeout_s=config.io_timeout,
        device=directory.device,
    )
