"""fio (https://fio.readthedocs.io): the bandwidth of the disk for a program that does nothing else.

Direct I/O by pread and pwrite, one request at a time in each of as many threads as the store has workers: the same
system calls, block size and depth. Its memory is like the store's: aligned, touched before the clock starts, and in
huge pages (by a switch of glibc; fio itself needs reserved ones). Times are those of fio's own clock.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .._report.results import CannotMeasure

Mode = Literal["write", "read", "both"]

_TIMEOUT_S = 300.0
# fio counts requests in flight at the end of the ramp in full: in runs of 0.8 s, blocks of 64 MiB at 3 GB/s looked a
# tenth faster than in runs of 3 s. So larger blocks get longer runs.
RUN_MS, _RAMP_MS = 800, 100
_BLOCK_BYTES_A_RUN = 16 << 20
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # glibc 2.35 and later; others ignore it


@dataclass(frozen=True, kw_only=True)
class FioRun:
    """All jobs together: bytes moved, bytes per second, and seconds of CPU time."""

    nbytes: int
    bytes_per_s: float
    cpu_s: float


class Fio:
    """fio on two files of `nbytes` each in `directory`, with `threads` requests at a time, for `run_ms` or longer."""

    def __init__(self, directory: Path, nbytes: int, threads: int, *, run_ms: int = RUN_MS) -> None:
        self._directory, self._nbytes, self._threads, self._run_ms = directory, nbytes, threads, run_ms
        self._files = [directory / "fio-1.data", directory / "fio-2.data"]

    @property
    def version(self) -> str:
        """The version, such as `fio-3.33`."""
        return self._call(["--version"]).strip()

    def run(self, mode: Mode, block_bytes: int) -> FioRun:
        """Write or read the first file; or read the first and write the second, half of the threads for each.

        `lay_out` comes first. Raises CannotMeasure.
        """
        return parse(self._call(arguments(mode, self._files, self._nbytes, block_bytes, self._threads, self._run_ms)))

    def lay_out(self) -> None:
        """Write both files once: runs then overwrite existing blocks, as a store does."""
        line = ["--ioengine=psync", "--direct=1", "--bs=4M", f"--size={self._nbytes}", "--rw=write"]
        for file in self._files:
            line += [f"--name={file.stem}", f"--filename={file.name}"]
        self._call(line)

    def clear(self) -> None:
        """Delete both files."""
        for file in self._files:
            file.unlink(missing_ok=True)

    def _call(self, line: list[str]) -> str:
        done = subprocess.run(
            ["fio", *line],
            cwd=self._directory,
            env={**os.environ, **_HUGE_PAGES},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise CannotMeasure(
                f"fio ended with status {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
            )
        return done.stdout


def arguments(mode: Mode, files: list[Path], nbytes: int, block_bytes: int, threads: int, run_ms: int) -> list[str]:
    """The command line of fio; `nbytes` is a multiple of `threads * block_bytes`."""
    share = threads if mode != "both" else max(1, threads // 2)
    jobs = list(zip(("read", "write"), files, strict=True)) if mode == "both" else [(mode, files[0])]
    line = ["--output-format=json", "--ioengine=psync", "--direct=1", "--thread", f"--bs={block_bytes}"]
    line += [f"--size={nbytes // share}", f"--offset_increment={nbytes // share}", f"--numjobs={share}"]
    run_ms *= max(1, block_bytes // _BLOCK_BYTES_A_RUN)
    line += ["--time_based", f"--runtime={run_ms}ms", f"--ramp_time={_RAMP_MS}ms"]
    line += ["--iomem_align=2M", "--scramble_buffers=0", "--overwrite=1", "--fallocate=none", "--invalidate=0"]
    for name, file in jobs:
        line += [f"--name={name}", f"--rw={name}", f"--filename={file.name}"]
    return line


def parse(text: str) -> FioRun:
    """Sum fio's JSON over all jobs. Raises CannotMeasure."""
    start = re.search(r"^\{", text, re.MULTILINE)  # notes may precede it
    try:
        jobs: list[dict[str, Any]] = json.loads(text[start.start() :] if start else "")["jobs"]
        if any(job["error"] for job in jobs):
            raise CannotMeasure(f"fio reports errors {[job['error'] for job in jobs]} of its jobs")
        sides = [job[side] for job in jobs for side in ("read", "write") if job[side]["io_bytes"]]
        cpu_s = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000 for job in jobs)
        rate = sum(side["io_bytes"] / side["runtime"] * 1000 for side in sides)
        if not sides:
            raise CannotMeasure("fio moved nothing")
        return FioRun(nbytes=sum(side["io_bytes"] for side in sides), bytes_per_s=rate, cpu_s=cpu_s)
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise CannotMeasure(f"fio's output cannot be read ({error!r}): {text[:400]!r}") from error
