"""Checks: what `tba doctor` found on a machine (`Facts`), and what that means for the chosen tier (`judge`)."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from tba._config import Setting
from tba._device_probe import DeviceFacts, KvikioFacts
from tba._disk_probe import DiskFacts
from tba._sizes import size
from tba._storage_path import PathFacts

# A SATA SSD reaches this. Below it, a step that saves 1 GB of activations needs more than 2 s each way.
_SLOW_BYTES_PER_S = 500e6
# A small GPT (24 layers of 256) saves about 1 GB in a step; a disk should hold a few steps of such a model.
_LITTLE_DISK_BYTES = 4 << 30
# Pinned copies reach 80 to 90% of what a link carries; less than half of it means something else is in the way.
_LEAST_LINK_SHARE = 0.5
_USES_DISK = ("nvme", "auto")


class Level(enum.StrEnum):
    """How a finding bears on the chosen tier."""

    OK = "ok"  # as it should be
    WARNING = "warning"  # it works, but not as well as it could, or not for long
    FAILURE = "failure"  # the chosen tier cannot work


@dataclass(frozen=True)
class Finding:
    """One judgement. `do` says what to do about it, "" where nothing need be done."""

    level: Level
    subject: str
    text: str
    do: str = ""


@dataclass(frozen=True, kw_only=True)
class PathReport:
    """One storage path. `refusal` is why it cannot serve, `free_bytes` leaves out what only the superuser may take,
    `disk` is None where nothing was tried."""

    path: str
    facts: PathFacts
    refusal: str | None = None
    free_bytes: int | None = None
    disk: DiskFacts | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Host memory by the machine and its cgroups, and the budgets of one process. Bytes; None: no limit."""

    total_bytes: int
    free_bytes: int
    locked_limit_bytes: int | None
    local_ranks: int
    cpu_budget_bytes: int
    nvme_budget_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class EnduranceReport:
    """The allowance of bytes written per day (UTC); None: no limit."""

    limit_bytes: int | None = None
    written_today_bytes: int = 0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AllocatorReport:
    """The allocator this process runs on, and the one `tba run` would start a program under."""

    in_force: str
    best: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything `tba doctor` found."""

    platform: str
    tier: str
    io_backend: str
    paths: tuple[PathReport, ...]
    no_path: str | None = None  # why no default directory can serve
    memory: MemoryReport
    devices: tuple[DeviceFacts, ...] = ()
    kvikio: KvikioFacts
    allocator: AllocatorReport
    endurance: EnduranceReport = EnduranceReport()
    io_threads: int = 2  # per path
    settings: tuple[Setting, ...] = ()


def judge(facts: Facts) -> list[Finding]:
    """What the facts mean, in the order of a report. The tier cannot work if any finding is a failure."""
    return [
        *_platform(facts),
        *(finding for path in facts.paths for finding in _path(path, facts)),
        *_paths(facts),
        *_memory(facts),
        *(finding for device in facts.devices for finding in _device(device)),
        *_kvikio(facts),
        *_allocator(facts),
        *_endurance(facts.endurance),
    ]


def _platform(facts: Facts) -> Iterator[Finding]:
    if facts.tier in _USES_DISK and not facts.platform.startswith("linux"):
        yield Finding(
            Level.FAILURE,
            "system",
            f"tier {facts.tier} needs Linux (O_DIRECT, fallocate), this is {facts.platform}",
            "choose --tier cpu or keep",
        )
    if facts.tier == "cpu" and not facts.devices:
        yield Finding(
            Level.WARNING,
            "system",
            "tier cpu moves tensors of a GPU to host memory, and there is no CUDA device: nothing will move",
            "choose --tier nvme",
        )
    if facts.tier == "keep":
        yield Finding(Level.OK, "system", "tier keep moves nothing")


def _path(path: PathReport, facts: Facts) -> Iterator[Finding]:
    if path.refusal is not None:
        level = Level.FAILURE if facts.tier in _USES_DISK else Level.WARNING
        text, _, do = path.refusal.partition("; ")
        yield Finding(level, path.path, text, do)
        return
    mount = path.facts.mount
    if mount.over_network:
        yield Finding(
            Level.WARNING,
            path.path,
            f"is on a network file system ({mount.kind}): expect waits",
            "name a directory on a local disk with --path or TBA_STORAGE_PATHS",
        )
    if path.free_bytes is not None and path.free_bytes < _LITTLE_DISK_BYTES:
        yield Finding(
            Level.WARNING,
            path.path,
            f"{path.free_bytes:,} bytes are free, less than a few steps of even a small model need",
            "free some space or name another directory",
        )
    if path.disk is not None:
        yield from _disk(path.path, path.disk, facts)


def _disk(path: str, disk: DiskFacts, facts: Facts) -> Iterator[Finding]:
    if disk.error is not None:
        level = Level.FAILURE if facts.tier in _USES_DISK else Level.WARNING
        yield Finding(level, path, f"the probe failed: {disk.error}", "look at the disk, or name another directory")
        return
    if not disk.direct:
        yield Finding(
            Level.WARNING,
            path,
            "direct I/O (O_DIRECT) does not work there: bytes go through the page cache, which costs memory and CPU "
            "time, and the speeds are not the disk's",
            "name a directory on ext4 or xfs",
        )
    if not disk.speeds:
        yield Finding(Level.OK, path, "can be used; its speed was not measured")
        return
    write = max(speed.write_bytes_per_s for speed in disk.speeds)
    read = max(speed.read_bytes_per_s for speed in disk.speeds)
    told = f"writes {write / 1e9:.2f} GB/s and reads {read / 1e9:.2f} GB/s, every byte as it was written"
    if min(write, read) < _SLOW_BYTES_PER_S:
        seconds = 1e9 / min(write, read)
        yield Finding(
            Level.WARNING,
            path,
            f"{told}: slow, a step that saves 1 GB moves it in {seconds:.1f} s",
            "name a directory on an NVMe drive, several on different drives, or measure again when nothing else runs",
        )
    else:
        yield Finding(Level.OK, path, told)


def _paths(facts: Facts) -> Iterator[Finding]:
    if facts.no_path is not None:
        level = Level.FAILURE if facts.tier in _USES_DISK else Level.WARNING
        yield Finding(level, "storage paths", facts.no_path, "name a directory on a disk with --path")
    devices: dict[int, str] = {}
    for path in facts.paths:
        if path.facts.device is None:
            continue
        other = devices.setdefault(path.facts.device, path.path)
        if other != path.path:
            yield Finding(
                Level.WARNING,
                path.path,
                f"is on the same file system as {other}: using both is no faster than one",
                "name directories on different drives",
            )


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    told = f"{size(memory.free_bytes)} of {size(memory.total_bytes)} are free"
    shared = f" ({memory.local_ranks} ranks share the node)" if memory.local_ranks > 1 else ""
    if facts.tier == "cpu" and memory.cpu_budget_bytes * memory.local_ranks > memory.free_bytes:
        yield Finding(
            Level.WARNING,
            "memory",
            f"{told}, and tier cpu may take {size(memory.cpu_budget_bytes)} for each process{shared}",
            "lower TBA_CPU_BUDGET, or end what else uses memory",
        )
    else:
        yield Finding(Level.OK, "memory", told + shared)


def _device(device: DeviceFacts) -> Iterator[Finding]:
    subject = f"cuda:{device.index}"
    if device.error is not None:
        yield Finding(
            Level.WARNING,
            subject,
            f"copying with pinned memory failed: {device.error}",
            "raise the locked-memory limit (ulimit -l), or free memory of the device; copies go through pageable "
            "memory, slower",
        )
    link = device.link
    if link is not None and link.width < link.max_width:
        yield Finding(
            Level.WARNING,
            subject,
            f"its PCIe link has {link.width} of {link.max_width} lanes",
            "seat the card in a slot with all lanes",
        )
    rates = [rate for rate in (device.to_device_bytes_per_s, device.to_host_bytes_per_s) if rate is not None]
    if rates and link is not None and min(rates) < _LEAST_LINK_SHARE * link.bytes_per_s:
        yield Finding(
            Level.WARNING,
            subject,
            f"copies {min(rates) / 1e9:.1f} GB/s over a link of {link.bytes_per_s / 1e9:.1f} GB/s",
            "measure again when nothing else uses it; bind the process to the CPUs next to the GPU (numactl)",
        )
    elif rates:
        yield Finding(Level.OK, subject, f"copies {min(rates) / 1e9:.1f} GB/s with pinned memory")


def _kvikio(facts: Facts) -> Iterator[Finding]:
    kvikio = facts.kvikio
    if kvikio.error is not None:
        asked = facts.io_backend == "kvikio"
        level = Level.FAILURE if asked and facts.tier in _USES_DISK else Level.WARNING if asked else Level.OK
        yield Finding(
            level,
            "kvikio",
            kvikio.error + ("" if asked else ": the posix backend is used"),
            "pip install 'tba-offload[gds]', or choose TBA_IO_BACKEND=posix" if asked else "",
        )
    elif kvikio.mode == "gds":
        yield Finding(Level.OK, "kvikio", f"{kvikio.version}: GPUDirect Storage, from disk to GPU")
    elif kvikio.mode is None:
        yield Finding(Level.OK, "kvikio", f"{kvikio.version} imports; there was no storage path to ask it about")
    else:
        asked = facts.io_backend == "kvikio"
        yield Finding(
            Level.WARNING if asked else Level.OK,
            "kvikio",
            f"{kvikio.version}: compatibility mode, bytes go through the host",
            "see whether nvidia-fs is loaded and the file system supports GDS (gdscheck -p)" if asked else "",
        )


def _allocator(facts: Facts) -> Iterator[Finding]:
    allocator = facts.allocator
    if allocator.in_force.startswith("glibc") and not facts.devices and facts.tier != "keep":
        yield Finding(
            Level.WARNING,
            "allocator",
            f"a program started like this one runs on {allocator.in_force}: what offloading frees stays in its heap, "
            "or is faulted anew",
            f"start it with `tba run -- ...`, which would choose {allocator.best}",
        )
    else:
        yield Finding(Level.OK, "allocator", f"{allocator.in_force} is in force")


def _endurance(endurance: EnduranceReport) -> Iterator[Finding]:
    for problem in endurance.problems:
        text, _, do = problem.partition("; ")
        yield Finding(Level.WARNING, "endurance", text, do)
    if endurance.limit_bytes is None:
        return
    told = f"{endurance.written_today_bytes:,} of {endurance.limit_bytes:,} bytes a day have been written today (UTC)"
    if endurance.written_today_bytes >= endurance.limit_bytes:
        yield Finding(
            Level.WARNING,
            "endurance",
            f"{told}: tensors stay in memory until tomorrow",
            "raise TBA_MAX_WRITE_BYTES_PER_DAY",
        )
    else:
        yield Finding(Level.OK, "endurance", told)
