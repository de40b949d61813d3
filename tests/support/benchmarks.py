"""Benchmarks run from tests: through their command line, with arms in this process instead of one of their own each."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks._processes import arms
from benchmarks._processes.worker import Worker
from tba import OffloadWarning

_ROOT = Path(__file__).resolve().parents[2]


class LocalChild:
    """A `Child` without a process: what goes in and out is JSON, and PyTorch's random state and hooks are its own.

    PyTorch keeps hooks by thread, so each child has one.
    """

    def __init__(self, name: str, module: str, *, environment: Mapping[str, str]) -> None:
        assert module == "benchmarks._processes.worker"
        self._worker = Worker()
        self._random = torch.get_rng_state()
        self._question = ""
        self._thread = ThreadPoolExecutor(1)

    def close(self) -> None:
        self._thread.shutdown()

    def ask(self, question: Any, *, timeout_s: float, tell: Callable[[str], None] = lambda note: None) -> Any:
        self.send(question)
        return self.receive(timeout_s=timeout_s, tell=tell)

    def send(self, question: Any) -> None:
        self._question = json.dumps(question)

    def receive(self, *, timeout_s: float, tell: Callable[[str], None] = lambda note: None) -> Any:
        return json.loads(self._thread.submit(self._answer, tell).result(timeout_s))

    def _answer(self, tell: Callable[[str], None]) -> str:
        with torch.random.fork_rng():
            torch.set_rng_state(self._random)
            answer = self._worker.answer(json.loads(self._question), tell)
            self._random = torch.get_rng_state()
        return json.dumps(answer)


@contextmanager
def arms_in_this_process(scratch: Path) -> Iterator[None]:
    """Arms have no process of their own; what they offload goes to `scratch`."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        patch.setattr(arms, "Child", LocalChild)
        patch.setenv("TBA_STORAGE_PATHS", str(scratch))
        patch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    # Modules that were imported stay, so collections of later tests need not look through them.
    gc.collect()
    gc.freeze()


def run_benchmark(*arguments: str, scratch: Path) -> Any:
    """`python -m benchmarks <arguments> --quick --json` in this process: the JSON it prints."""
    with arms_in_this_process(scratch):
        done = CliRunner().invoke(app, [*arguments, "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def quick(name: str, scratch: Path, *options: str) -> Any:
    """Run a benchmark with `--quick` in processes of its own; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--threads", "1", *options, "--quick", "--json"],
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TBA_STORAGE_PATHS": str(scratch)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
