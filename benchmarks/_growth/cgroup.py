"""A memory cgroup (v1): what a process allocates after it has entered is limited, and it is killed beyond that."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .._report.results import CannotMeasure

_ROOT = Path("/sys/fs/cgroup/memory")
_NUMBERS = itertools.count()
_ENDING_S = 5.0  # a killed process leaves its cgroup a moment after its parent has seen it end


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """Make a cgroup of so many bytes, without swap, and remove it at the end.

    Raises:
        CannotMeasure: this machine or user cannot have one.
    """
    path = _ROOT / f"tba-benchmarks-{os.getpid()}-{next(_NUMBERS)}"
    try:
        path.mkdir()
    except OSError as error:
        raise CannotMeasure(f"no memory cgroup (v1) can be made here, which takes root: {error}") from None
    try:
        (path / "memory.limit_in_bytes").write_text(str(limit_bytes))
        with suppress(OSError):  # absent where swap is not accounted
            (path / "memory.memsw.limit_in_bytes").write_text(str(limit_bytes))
        yield path
    finally:
        until_s = time.monotonic() + _ENDING_S
        while path.exists():
            try:
                path.rmdir()
            except OSError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.05)


def enter(path: Path) -> None:
    """Put this process into a cgroup."""
    (path / "cgroup.procs").write_text(str(os.getpid()))
