"""Facts that `tba doctor` finds on a machine that is fit, for its tests to change."""

from __future__ import annotations

from tba._transfer.scratch_paths import Mount, PathFacts
from tba.cli._doctor.checks import Facts, MemoryReport, PathReport
from tba.cli._doctor.device_probe import DeviceFacts, KvikioFacts
from tba.cli._doctor.disk_probe import DiskFacts, Speed

GIB = 1 << 30
FAST = DiskFacts(alignment=512, speeds=(Speed(1 << 20, 1e9, 1.2e9, GIB), Speed(16 << 20, 2e9, 3e9, GIB)))
DISK = PathReport(
    path="/disk",
    facts=PathFacts(
        path="/disk", device=1, free_bytes=100 * GIB, mount=Mount(point="/", kind="ext4", source="/dev/vda")
    ),
    disk=FAST,
)
GPU = DeviceFacts(
    index=0,
    name="A GPU",
    total_bytes=80 * GIB,
    free_bytes=79 * GIB,
    to_device_bytes_per_s=25e9,
    to_host_bytes_per_s=26e9,
)
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
    kvikio=KvikioFacts(error="kvikio is not installed"),
    allocator="jemalloc",
    best_allocator="jemalloc",
    settings=({"name": "tier", "value": "nvme", "origin": "argument"},),
)
