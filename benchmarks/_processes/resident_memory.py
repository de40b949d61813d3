"""Resident memory of this process: now, its exact peak, and samples of it over time.

The kernel keeps the peak itself (`VmHWM`), so nothing between two samples is missed; writing 5 to
`/proc/self/clear_refs` resets it (proc(5)). Linux only.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident memory now."""
    return _status("VmRSS")


def reset_peak() -> None:
    """Reset the peak to the memory that is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Peak resident memory since `reset_peak`."""
    return _status("VmHWM")


def host_peak_bytes() -> int:
    """Peak resident memory over the life of this process."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}; memory is measured on Linux only")


@contextmanager
def sampled(interval_s: float) -> Iterator[list[tuple[float, int]]]:
    """Sample (`time.perf_counter()`, resident bytes) at this interval, at the beginning and at the end."""
    samples: list[tuple[float, int]] = []
    ended = threading.Event()
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)

    def sample() -> None:
        # statm is one short line; status has forty.
        resident = int(os.pread(descriptor, 128, 0).split()[1]) * _PAGE_BYTES
        samples.append((time.perf_counter(), resident))

    def run() -> None:
        while not ended.wait(interval_s):
            sample()

    thread = threading.Thread(target=run, name="memory-sampler", daemon=True)
    sample()
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
        sample()
        os.close(descriptor)
