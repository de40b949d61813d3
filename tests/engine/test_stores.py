"""The engine's own tests over every kind of store: each kind in a run of pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.engine import STORES

TESTS = Path(__file__).parents[1]
# The rest compare operators and models, to which the store makes no difference.
FILES = (
    "exact/test_identity",
    "exact/test_inplace",
    "engine/test_lifecycle",
    "engine/test_bounds",
    "engine/test_faults",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in STORES if kind != "posix"])  # posix is what they run over anyway
def test_the_engine_over(kind: str, tmp_path: Path) -> None:
    files = [str(TESTS / f"{name}.py") for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not really_runs_full", *files]
    environment = {**os.environ, "ENGINE_TEST_STORE": kind}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    run = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'inner'}"],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
