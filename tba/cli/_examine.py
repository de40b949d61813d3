"""Examination: gathers the facts `tba doctor` judges, by looking and by trying."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tba._config import OffloadConfig, describe
from tba._device_probe import locked_memory_limit_bytes, probe_devices, probe_kvikio
from tba._disk_probe import probe_bytes, probe_disk
from tba._endurance import Allowance
from tba._errors import OffloadWarning, StorageError
from tba._memory.budgets import cpu_budget_bytes, local_ranks, nvme_budget_bytes
from tba._memory.free_memory import free_bytes, total_bytes
from tba._storage_path import free_disk_bytes, look_at, refusal, storage_directories
from tba._transfer.build import io_threads

from ._allocators import allocator_environment, allocator_in_force
from ._checks import AllocatorReport, EnduranceReport, Facts, MemoryReport, PathReport

# Small transfers show what each costs, large ones what the disk can do.
BLOCK_SIZES = (1 << 20, 16 << 20)
# For each size of block, so that most of a day's allowance is left to training.
_ALLOWANCE_SHARE = 0.05


def examine(config: OffloadConfig, *, seconds: float, environ: Mapping[str, str] = os.environ) -> Facts:
    """Gather the facts for these settings.

    Args:
        config: the settings; storage paths are examined for tiers that use them, and where they are named.
        seconds: to measure each path, block size and direction for; 0 measures none.
        environ: what the allocator and the ranks of the node are told from.
    """
    devices = probe_devices()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        paths, no_path = _paths(config)
        # Of the paths the findings tell; what warns from here on is the allowance.
        warnings.simplefilter("always", OffloadWarning)
        allowance = Allowance(config.max_write_bytes_per_day)
        paths = tuple(_measured(path, config, seconds, allowance, on_device=bool(devices)) for path in paths)
        written = allowance.written_today_bytes
        allowance.close()
    ranks = local_ranks(environ)
    usable = [path.facts.path for path in paths if path.refusal is None]
    total = total_bytes()
    return Facts(
        platform=sys.platform,
        tier=config.tier,
        io_backend=config.io_backend,
        paths=paths,
        no_path=no_path,
        memory=MemoryReport(
            total_bytes=total,
            free_bytes=free_bytes(),
            locked_limit_bytes=locked_memory_limit_bytes(),
            local_ranks=ranks,
            cpu_budget_bytes=cpu_budget_bytes(config.cpu_budget, total, ranks),
            nvme_budget_bytes=nvme_budget_bytes(config.nvme_budget, free_disk_bytes(usable), ranks),
        ),
        devices=devices,
        kvikio=probe_kvikio(usable[0] if usable else None),
        allocator=AllocatorReport(
            in_force=allocator_in_force(_maps(), environ), best=allocator_environment("auto", environ).name
        ),
        endurance=EnduranceReport(
            limit_bytes=config.max_write_bytes_per_day,
            written_today_bytes=written,
            problems=tuple(str(warning.message).removeprefix("endurance allowance: ") for warning in caught),
        ),
        io_threads=io_threads(config, on_device=bool(devices)),
        settings=tuple(describe(config)),
    )


def _paths(config: OffloadConfig) -> tuple[tuple[PathReport, ...], str | None]:
    """The paths to be used, each looked at, or why there is none."""
    named = config.storage_paths
    if not sys.platform.startswith("linux"):
        return (), None
    if named is None:
        if config.tier not in ("nvme", "auto"):
            return (), None
        try:
            named = tuple(directory.path for directory in storage_directories(config))
        except StorageError as error:
            return (), str(error)
    return tuple(_look(path) for path in named), None


def _look(path: Path) -> PathReport:
    facts = look_at(path)
    reason = refusal(facts)
    return PathReport(
        path=str(path),
        facts=facts,
        refusal=reason,
        free_bytes=free_disk_bytes([path]) if facts.exists else None,
    )


def _measured(
    path: PathReport, config: OffloadConfig, seconds: float, allowance: Allowance, *, on_device: bool
) -> PathReport:
    if path.refusal is not None:
        return path
    sizes = BLOCK_SIZES if seconds > 0 else ()
    most_bytes = probe_bytes(path.free_bytes)
    if allowance.limit_bytes is not None:
        rest_bytes = allowance.limit_bytes - allowance.written_today_bytes
        most_bytes = max(0, min(most_bytes, int(rest_bytes * _ALLOWANCE_SHARE)))
        allowance.take(most_bytes * len(sizes))
    disk = probe_disk(
        path.facts.path,
        sizes,
        threads=io_threads(config, on_device=on_device),
        most_bytes=most_bytes,
        seconds=seconds,
        timeout_s=config.io_timeout,
    )
    allowance.give_back(most_bytes * len(sizes) - sum(speed.moved_bytes for speed in disk.speeds))
    return replace(path, disk=disk)


def _maps() -> str:
    try:
        return Path("/proc/self/maps").read_text(errors="surrogateescape")
    except OSError:
        return ""
