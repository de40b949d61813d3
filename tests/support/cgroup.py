"""A memory cgroup (v1) with a limit and no swap, for tests in which the kernel kills what needs more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup/memory")


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """Make it, and remove it at the end; the test is skipped where none can be made."""
    path = CGROUPS / f"tba-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    with suppress(OSError):  # absent where swap is not accounted
        (path / "memory.memsw.limit_in_bytes").write_text(str(limit_bytes))
    yield path
    path.rmdir()
