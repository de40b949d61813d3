"""Facts that `tba doctor` finds on a machine that is fit, for its tests to change."""

from __future__ import annotations

from tba._transfer.scratch_paths import Mount, PathFacts
from tba.cli._doctor.checks import Facts, MemoryReport, PathReport
from tba.cli._doctor.device_probe import DeviceFacts, KvikioFacts
from tba.cli._doctor.disk_probe import DiskFacts

GIB = 1 << 30
FAST = DiskFacts(direct=True, write_bytes_per_s=2e9, read_bytes_per_s=3e9, moved_bytes=GIB)
DISK = PathReport(
    path="/disk",
    facts=PathFacts(
        path="/disk", device=1, free_bytes=100 * GIB, mount=Mount(point="/", kind="ext4", source="/dev/vda")
    ),
    disk=FAST,
)
GPU = DeviceFacts(index=0, name="A GPU", total_bytes=80 * GIB, free_bytes=79 * GIB)
FIT = Facts(
    tier="nvme",
    io_backend="auto",
    paths=(DISK,),
    memory=MemoryReport(
        total_bytes=64 * GIB,
        free_bytes=50 * GIB,
        local_ranks=1,
        cpu_budget_bytes=32 * GIB,
        nvme_budget_bytes=80 * GIB,
    ),
    kvikio=KvikioFacts(error="not installed"),
    allocator="jemalloc",
    best_allocator="jemalloc",
    settings=({"name": "tier", "value": "nvme", "origin": "argument"},),
)
