"""What docs/stories.md tells of waves and of checkpointing, by the two examples that tell it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.cgroup import memory_cgroup

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_BYTES = 384 << 20  # plain takes 495 MiB, 243 of them states


def example(name: str, *arguments: str, scratch: Path, cgroup: Path | None = None, **settings: str) -> tuple[int, str]:
    """Run an example under an allocator that returns what is freed; return its status and what it printed."""
    command = [sys.executable, "-m", "tba", "run", "--allocator", "glibc", "--", sys.executable]
    if cgroup is not None:
        command = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TBA_STORAGE_PATHS": str(scratch)} | settings
    command += [str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


def gradients(printed: str) -> list[str]:
    return re.findall(r"loss (\S+, gradient [0-9a-f]{16})", printed)


def offloaded(printed: str) -> bool:
    return re.search(r"handed to the tier +[\d.]+ [KMG]iB", printed) is not None


@pytest.mark.exhaustive
def test_a_wave_has_plains_gradients_whatever_moves(scratch: Path) -> None:
    size = ["--size", "32", "--steps", "60", "--iterations", "4"]
    _, plain = example("wave_inversion", *size, "--plain", scratch=scratch)
    assert len(set(gradients(plain))) == 4, plain
    for settings in (["--tier", "nvme"], ["--memory-budget", "2MiB"]):
        status, ours = example("wave_inversion", *size, *settings, scratch=scratch, TBA_MIN_TENSOR_BYTES="8KiB")
        assert status == 0, ours
        assert gradients(ours) == gradients(plain), ours
        assert offloaded(ours), ours


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_wave_larger_than_memory_finishes_where_plain_is_killed(scratch: Path) -> None:
    size = ["--size", "64", "--steps", "240", "--iterations", "1"]
    with memory_cgroup(LIMIT_BYTES) as cgroup:
        status, printed = example("wave_inversion", *size, "--plain", scratch=scratch, cgroup=cgroup)
        assert status == -9, f"plain fits: the test proves nothing: {printed}"
        status, ours = example("wave_inversion", *size, scratch=scratch, cgroup=cgroup)  # which reads the limit
    assert status == 0, ours
    assert offloaded(ours), ours
    _, plain = example("wave_inversion", *size, "--plain", scratch=scratch)
    assert gradients(ours) == gradients(plain) != [], ours


@pytest.mark.exhaustive
def test_a_plan_leaves_the_state_that_checkpointing_changes(scratch: Path) -> None:
    status, printed = example("what_checkpointing_changes", scratch=scratch)
    assert status == 0, printed
    rows = re.findall(r" ([=x]) +\S+ ([=x]) +\S+ ([=x])$", printed, re.MULTILINE)
    assert rows == [("x", "=", "=")] * 7, printed
    moved = re.findall(r"(\d+) of (\d+) tensors .* bit for bit", printed)
    assert moved[1:] == [("36", "36")] * 2, printed
    assert min(float(mib) for mib in re.findall(r"handed to the tier ([\d.]+) MiB", printed)) > 0
