"""Examination: collect the facts that `tba doctor` judges, by looking and by trying."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import replace
from pathlib import Path

from io_backends import StoreError
from tba._config import OffloadConfig, describe
from tba._device.streams import active_device
from tba._errors import OffloadWarning, StorageError
from tba._memory.budgets import cpu_budget_bytes, local_ranks, nvme_budget_bytes
from tba._memory.free_memory import free_bytes, total_bytes
from tba._torch.user_frames import warn
from tba._transfer.build import io_threads
from tba._transfer.daily_allowance import Allowance
from tba._transfer.measured import choose, measured_file, read, record, setup_of
from tba._transfer.scratch_paths import free_disk_bytes, look_at, refusal, storage_directories

from .._allocators import allocator_environment, allocator_in_force
from .checks import Facts, MemoryReport, PathReport
from .device_probe import probe_devices, probe_kvikio
from .disk_probe import probe_bytes, probe_disk
from .way_probe import probe_bytes as probe_ways_bytes
from .way_probe import probe_ways

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# The rest of a day's allowance is for training.
_ALLOWANCE_SHARE = 0.05


def examine(config: OffloadConfig, *, seconds: float) -> Facts:
    """Collect the facts for these settings.

    Args:
        config: the settings; storage paths are examined if they are named or the tier uses them.
        seconds: how long to measure each path and direction; 0 measures nothing.
    """
    devices = probe_devices()
    threads = io_threads(config, on_device=bool(devices))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)  # the findings report on the paths
        paths, no_path = _paths(config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OffloadWarning)
        allowance = Allowance(config.max_write_bytes_per_day)
        paths = tuple(_measured(path, config, seconds, threads, allowance) for path in paths)
        kvikio = probe_kvikio(next((path.facts.path for path in paths if path.refusal is None), None))
        if devices and config.tier in ("nvme", "auto"):
            tries = kvikio.mode == "gds" and seconds > 0
            paths = tuple(_compared(path, threads, allowance if tries else None) for path in paths)
        allowance.close()
    ranks = local_ranks()
    usable = [path.facts.path for path in paths if path.refusal is None]
    total = total_bytes()
    maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    return Facts(
        tier=config.tier,
        io_backend=config.io_backend,
        paths=paths,
        no_path=no_path,
        memory=MemoryReport(
            total_bytes=total,
            free_bytes=free_bytes(),
            local_ranks=ranks,
            cpu_budget_bytes=cpu_budget_bytes(config.cpu_budget, total, ranks),
            nvme_budget_bytes=nvme_budget_bytes(config.nvme_budget, free_disk_bytes(usable) if usable else None, ranks),
        ),
        devices=devices,
        kvikio=kvikio,
        allocator=allocator_in_force(maps, os.environ),
        best_allocator=allocator_environment("auto").name,
        huge_pages=huge_pages(_read(_HUGE_PAGES), _read(Path("/proc/self/status"))),
        io_threads=threads,
        settings=tuple(setting._asdict() for setting in describe(config)),
        warnings=tuple(str(warning.message) for warning in caught),
    )


def huge_pages(enabled: str, status: str) -> str:
    """Find whether a process may have transparent huge pages.

    Args:
        enabled: the system's switch, such as "always [madvise] never".
        status: of the process; a container may have turned them off for it (`prctl(PR_SET_THP_DISABLE)`).
    """
    if re.search(r"^THP_enabled:\s*0", status, re.MULTILINE):
        return "never"
    chosen = re.search(r"\[(\w+)\]", enabled)
    return chosen[1] if chosen else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # a kernel without huge pages, or a container that hides the file
        return ""


def _paths(config: OffloadConfig) -> tuple[tuple[PathReport, ...], str | None]:
    """Look at the storage paths; if no default can be used, return none and why."""
    named = config.storage_paths
    if named is None:
        if config.tier not in ("nvme", "auto"):
            return (), None
        try:
            named = tuple(directory.path for directory in storage_directories(config))
        except StorageError as error:
            return (), str(error)
    looks = ((str(path), look_at(path)) for path in named)
    return tuple(PathReport(path=path, facts=facts, refusal=refusal(facts)) for path, facts in looks), None


def _measured(
    path: PathReport, config: OffloadConfig, seconds: float, threads: int, allowance: Allowance
) -> PathReport:
    """Measure the speed of a path, within the daily allowance."""
    if path.refusal is not None:
        return path
    most_bytes = probe_bytes(path.facts.free_bytes) if seconds > 0 else 0
    if allowance.limit_bytes is not None:
        most_bytes = min(most_bytes, int(allowance.limit_bytes * _ALLOWANCE_SHARE))
    if not allowance.take(most_bytes):
        most_bytes = 0
    timeout_s = config.io_timeout
    disk = probe_disk(path.facts.path, threads=threads, most_bytes=most_bytes, seconds=seconds, timeout_s=timeout_s)
    allowance.give_back(most_bytes - disk.moved_bytes)
    return replace(path, disk=disk)


def _compared(path: PathReport, threads: int, allowance: Allowance | None) -> PathReport:
    """Find what "auto" takes for a path, after measuring kvikio against pinned memory if the `allowance` permits."""
    if path.refusal is not None:
        return path
    directory, file = path.facts.path, measured_file()
    setup = setup_of(directory)
    if setup is not None and allowance is not None and _spares(path, allowance):
        try:
            why_not = record(file, setup, *probe_ways(directory, active_device(), threads))
        except (StoreError, StorageError, RuntimeError) as error:
            why_not = f"kvikio could not be measured in {directory}: {error}"
        if why_not is not None:
            warn(f"io_backend: {why_not}; auto takes what was measured before")
    return replace(path, auto=choose(read(file), setup))


def _spares(path: PathReport, allowance: Allowance) -> bool:
    """Whether the disk and the day's allowance have room for a measurement."""
    nbytes = probe_ways_bytes()
    if path.facts.free_bytes is not None and probe_bytes(path.facts.free_bytes) < nbytes:
        return False
    if allowance.limit_bytes is not None and nbytes > allowance.limit_bytes * _ALLOWANCE_SHARE:
        return False
    return allowance.take(nbytes)
