"""Checks: facts that `tba doctor` found on a machine, and rules that judge them for the chosen tier.

A rule is a pure function from facts to findings; `RULES` lists them in the order of the report.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tba._text import size
from tba._transfer.measured import Choice
from tba._transfer.scratch_paths import PathFacts

from .device_probe import DeviceFacts, KvikioFacts
from .disk_probe import DiskFacts

# A SATA SSD reaches this. Below it, a step that saves 1 GB of activations needs more than 2 s each way.
_SLOW_BYTES_PER_S = 500e6
# A small GPT (24 layers of 256) saves about 1 GB in a step; a disk should hold a few steps of such a model.
_LITTLE_DISK_BYTES = 4 << 30


class Level(enum.StrEnum):
    """Severity of a finding, for the chosen tier."""

    OK = "ok"  # nothing to do
    UNUSED = "unused"  # not here, and nothing needs it
    WARNING = "warning"  # it works, but less well than it could, or not for long
    FAILURE = "failure"  # the chosen tier cannot work


@dataclass(frozen=True)
class Finding:
    """One judgement. `do` says what to do about it, "" if nothing needs to be done."""

    level: Level
    subject: str
    text: str
    do: str = ""


@dataclass(frozen=True, kw_only=True)
class PathReport:
    """One storage path. `refusal` is why it cannot be used; `disk` is None if it was not tried.

    `auto` is what `io_backend="auto"` takes for tensors of a device there; None without a device.
    """

    path: str
    facts: PathFacts
    refusal: str | None = None
    disk: DiskFacts | None = None
    auto: Choice | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Host memory of the machine and its cgroups, and the budgets of one process, in bytes; None: no limit."""

    total_bytes: int
    free_bytes: int
    local_ranks: int
    cpu_budget_bytes: int
    nvme_budget_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All facts that `tba doctor` found."""

    tier: str
    io_backend: str
    paths: tuple[PathReport, ...]
    no_path: str | None = None  # why no default directory can be used
    memory: MemoryReport
    devices: tuple[DeviceFacts, ...] = ()
    kvikio: KvikioFacts
    allocator: str  # of this process
    best_allocator: str  # that `tba run` would choose
    huge_pages: str = ""  # whether memory may be in transparent huge pages: always, madvise, never; "" if unknown
    io_threads: int = 2  # per path
    settings: tuple[dict[str, Any], ...] = ()  # name, value and origin of each
    warnings: tuple[str, ...] = ()  # as a training with these settings would give them

    @property
    def no_disk(self) -> Level:
        """Severity of a storage path that cannot be used."""
        return Level.FAILURE if self.tier in ("nvme", "auto") else Level.WARNING

    @property
    def on_cpu(self) -> bool:
        """Whether the tensors that move are in this process's memory, so that its allocator and pages matter."""
        return not self.devices and self.tier != "keep"


def judge(facts: Facts) -> list[Finding]:
    """Judge the facts by every rule. The tier cannot work if any finding is a failure."""
    return [finding for rule in RULES for finding in rule(facts)]


def verdict(facts: Facts, findings: Sequence[Finding]) -> str:
    """Say in a line whether the tier can work, and what stands in its way or could be better."""
    failed, warned = ([each for each in findings if each.level is level] for level in (Level.FAILURE, Level.WARNING))
    if failed:
        reasons = "; ".join(f"{each.subject}: {each.text}" for each in failed)
        return f"tier {facts.tier} cannot work here: {reasons}"
    could = f"; could be better: {', '.join(dict.fromkeys(each.subject for each in warned))}" if warned else ""
    return f"tier {facts.tier} can work here{could}"


def _paths(facts: Facts) -> Iterator[Finding]:
    if facts.no_path is not None:
        yield Finding(facts.no_disk, "storage paths", facts.no_path, "name a directory on a disk with --path")
    for path in facts.paths:
        if path.refusal is not None:
            text, _, do = path.refusal.partition("; ")
            yield Finding(facts.no_disk, path.path, text, do)
        elif path.disk is not None and path.disk.error is not None:
            text = f"the probe failed: {path.disk.error}"
            yield Finding(facts.no_disk, path.path, text, "check the disk, or name another directory")
        elif path.disk is not None:
            yield from (Finding(level, path.path, text, do) for level, text, do in _disk(path.facts, path.disk))


def _disk(path: PathFacts, disk: DiskFacts) -> Iterator[tuple[Level, str, str]]:
    mount, free_bytes = path.mount, path.free_bytes
    if mount.over_network:
        do = "name a directory on a local disk with --path or TBA_STORAGE_PATHS"
        yield Level.WARNING, f"is on a network file system ({mount.kind}): expect waits", do
    if free_bytes is not None and free_bytes < _LITTLE_DISK_BYTES:
        text = f"{size(free_bytes)} are free, less than a few steps of even a small model need"
        yield Level.WARNING, text, "free some space or name another directory"
    if not disk.direct:
        text = (
            "direct I/O (O_DIRECT) does not work there: the page cache costs memory and CPU time, and the speeds are "
            "not the disk's"
        )
        yield Level.WARNING, text, "name a directory on ext4 or xfs"
    free = f", {size(free_bytes)} free" if free_bytes is not None else ""
    place = f"{mount.kind or 'file system'} on {mount.source or 'an unknown device'}{free}"
    if disk.write_bytes_per_s is None or disk.read_bytes_per_s is None:
        yield Level.OK, f"{place}; can be used; its speed was not measured", ""
        return
    write, read = disk.write_bytes_per_s, disk.read_bytes_per_s
    told = f"{place}; writes {write / 1e9:.2f} GB/s and reads {read / 1e9:.2f} GB/s, every byte verified"
    if (slower := min(write, read)) >= _SLOW_BYTES_PER_S:
        yield Level.OK, told, ""
    else:
        do = "name a directory on an NVMe drive, several on different drives, or measure again on an idle machine"
        yield Level.WARNING, f"{told}: slow, a step that saves 1 GB moves it in {1e9 / slower:.1f} s", do


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    told = f"{size(memory.free_bytes)} of {size(memory.total_bytes)} are free (machine and cgroup)"
    shared = f" ({memory.local_ranks} ranks share the node)" if memory.local_ranks > 1 else ""
    if facts.tier == "cpu" and memory.cpu_budget_bytes * memory.local_ranks > memory.free_bytes:
        text = f"{told}, and tier cpu may take {size(memory.cpu_budget_bytes)} for each process{shared}"
        yield Finding(Level.WARNING, "memory", text, "lower TBA_CPU_BUDGET, or end other programs that use memory")
    else:
        yield Finding(Level.OK, "memory", told + shared)


def _devices(facts: Facts) -> Iterator[Finding]:
    for device in facts.devices:
        subject = f"{device.kind}:{device.index}"
        if device.error is not None:
            text = f"{device.name} cannot be used: {device.error}"
            yield Finding(Level.WARNING, subject, text, "end what holds it, or hide it with CUDA_VISIBLE_DEVICES")
        else:
            told = f"{device.name}, {size(device.free_bytes)} of {size(device.total_bytes)} are free"
            yield Finding(Level.OK, subject, told)
    if not facts.devices and facts.tier == "cpu":
        text = "no CUDA device: tier cpu moves GPU tensors to host memory, so nothing will move"
        yield Finding(Level.WARNING, "GPU", text, "choose --tier nvme")
    elif not facts.devices:
        yield Finding(Level.OK, "GPU", "no CUDA device")


def _kvikio(facts: Facts) -> Iterator[Finding]:
    kvikio, asked = facts.kvikio, facts.io_backend == "kvikio"
    level, do = Level.OK, ""
    if kvikio.error is not None:
        level, do = facts.no_disk, "pip install 'tba-offload[gds]', or choose TBA_IO_BACKEND=posix"
        text = kvikio.error + ("" if asked else "; optional: the posix backend is used")
    elif kvikio.mode == "compat":
        level, do = Level.WARNING, "check that nvidia-fs is loaded and the file system supports GDS (gdscheck -p)"
        text = f"{kvikio.version}: compatibility mode, bytes go through the host"
    else:
        how = "GPUDirect Storage, from disk to GPU" if kvikio.mode else "there was no storage path to try it on"
        text = f"{kvikio.version}: {how}"
    unused = Level.OK if kvikio.error is None else Level.UNUSED
    yield Finding(level, "kvikio", text, do) if asked else Finding(unused, "kvikio", text)


def _auto(facts: Facts) -> Iterator[Finding]:
    for path in facts.paths if facts.io_backend == "auto" else ():
        if path.auto is not None:
            yield Finding(Level.OK, "io_backend", f"auto takes {path.auto.backend} in {path.path}: {path.auto.why}")


def _allocator(facts: Facts) -> Iterator[Finding]:
    if facts.on_cpu and facts.allocator.startswith("glibc"):
        text = (
            f"a program started like this one runs on {facts.allocator}, which keeps the memory that offloading frees, "
            "or faults its pages again"
        )
        do = f"start it with `tba run -- ...`, which would choose {facts.best_allocator}"
        yield Finding(Level.WARNING, "allocator", text, do)
    else:
        yield Finding(Level.OK, "allocator", f"this process runs on {facts.allocator}")


def _huge_pages(facts: Facts) -> Iterator[Finding]:
    if facts.on_cpu and facts.huge_pages == "never":
        text = (
            "this process gets no transparent huge pages: direct I/O pins its memory in pages of 4 KiB, which cost a "
            "step 3.6% in our measurement"
        )
        do = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (in a container: on its host)"
        yield Finding(Level.WARNING, "huge pages", text, do)


def _warnings(facts: Facts) -> Iterator[Finding]:
    for warning in facts.warnings:
        subject, _, rest = warning.partition(": ")
        text, _, do = rest.partition("; ")
        yield Finding(Level.WARNING, subject, text, do)


RULES = (_paths, _memory, _devices, _kvikio, _auto, _allocator, _huge_pages, _warnings)
