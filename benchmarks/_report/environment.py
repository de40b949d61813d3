"""The environment of a result: machine, versions and settings that its numbers come from."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Allocated(Protocol):
    """An arm, whose process runs under an allocator."""

    allocator: str


def environment_block(
    arms: Mapping[str, Allocated], *, threads: int, card: str = "", starts: int = 0
) -> dict[str, str]:
    """Describe machine, versions, allocators and settings of a run, and its sets of processes; no host name.

    `card` is the name of the device, if it is no CPU.
    """
    import torch

    import tba

    block = {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": f"{os.cpu_count()} ({threads} threads used)",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "huge pages": _huge_pages(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tba": tba.__version__,
        "allocators": "; ".join(f"{name}: {arm.allocator}" for name, arm in arms.items()),
    }
    if card:
        block["gpu"] = card
    if starts:
        block["processes"] = f"{starts} of each arm, one after another"
    # A variable that holds a path is named without its value.
    changed = [f"{k}={'...' if 'PATH' in k else v}" for k, v in sorted(os.environ.items()) if k.startswith("TBA_")]
    return block | ({"settings": ", ".join(changed)} if changed else {})


def _commit() -> str:
    if named := os.environ.get("COMMIT"):  # of a copy whose history is another's, or none
        return named

    def git(*arguments: str) -> str:
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # Results are filed into the tree that is measured; filing one is no change.
        changed = git("status", "--porcelain", "--", ":!benchmarks/results")
        return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "none"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "none"
    return text.partition("[")[2].partition("]")[0]
