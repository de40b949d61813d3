"""Resident memory of this process: now, its exact peak over a stretch of time, and its course.

The kernel keeps the highest resident size itself (`VmHWM`), so nothing between two samples is missed; writing 5 to
`/proc/self/clear_refs` starts it anew (proc(5)). Linux only.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident memory now."""
    return _status("VmRSS")


def reset_peak() -> None:
    """Let the peak start anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The highest resident memory since `reset_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}; memory is measured on Linux only")


class Sampler:
    """A thread that notes `(time.perf_counter(), resident bytes)` while it is switched on.

    It is off between an arm's turns, so that the other arms' turns leave no trace in this arm's course.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._on = threading.Event()
        self._closed = False
        self._samples: list[tuple[float, int]] = []
        self._descriptor = os.open("/proc/self/statm", os.O_RDONLY)
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Begin a stretch: the first sample is taken before this returns."""
        self._samples = [self._sample()]
        self._on.set()

    def stop(self) -> list[tuple[float, int]]:
        """End the stretch and return its samples."""
        self._on.clear()
        samples = self._samples
        samples.append(self._sample())
        return samples

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._on.set()
        self._thread.join()
        os.close(self._descriptor)

    def _run(self) -> None:
        while True:
            self._on.wait()
            if self._closed:
                return
            self._samples.append(self._sample())
            time.sleep(self._interval_s)

    def _sample(self) -> tuple[float, int]:
        # statm is one short line; status would format forty.
        return time.perf_counter(), int(os.pread(self._descriptor, 128, 0).split()[1]) * _PAGE_BYTES
