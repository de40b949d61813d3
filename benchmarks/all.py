"""All: every benchmark one after the other, each by its own command line."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ._report.progress import progress
from ._report.results import Grid, Result

# With --quick nothing is timed, so that two may run beside each other.
_QUICK_JOBS = 2
_WORDS = 1500


def run_all(names: Sequence[str], *, quick: bool, options: Sequence[str]) -> Result:
    """Run the commands `names` with these options; what fails is named, and does not end the others."""
    found: dict[str, tuple[int, float, str]] = {}
    with progress("all", len(names)) as bar:

        def run(name: str) -> None:
            begun_s = time.monotonic()
            command = [sys.executable, "-m", "benchmarks", name, *(["--quick"] if quick else []), *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found[name] = done.returncode, time.monotonic() - begun_s, done.stderr.strip()[-_WORDS:]
            bar.advance(f"{name}: {'done' if done.returncode == 0 else 'FAILED'}")

        with ThreadPoolExecutor(_QUICK_JOBS if quick else 1) as pool:
            list(pool.map(run, names))
    rows = []
    for name in names:
        code, seconds, words = found[name]
        last = words.splitlines()[-1] if words and code else ""
        rows.append((name, "yes" if code == 0 else "NO", f"{seconds:.0f}", last))
    data = {"commands": {name: {"code": found[name][0], "seconds": found[name][1]} for name in names}}
    table = Grid("All benchmarks", ("command", "came to its end", "seconds", "last words"), rows)
    return Result(theme="all", tables=[table], data=data)
