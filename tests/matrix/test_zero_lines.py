"""Zero lines: under `tba run --memory-budget` each framework trains unchanged, to the same bits, and moves bytes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from matrix.launch import by_torchrun, launch

LIMIT_S = 300
SMALL = {"TBA_MIN_TENSOR_BYTES": "8KiB", "TBA_PREFETCH_BYTES": "32KiB", "TBA_STAGING_BYTES": "1MiB"}
ACCELERATE = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"]
# How each is started, how many ranks it has, and what is attached.
PROGRAMS = {
    "loop": ([], 1, "LlamaForCausalLM"),
    "trainer": ([], 1, "LlamaForCausalLM"),
    "sft": ([], 1, "LlamaForCausalLM"),
    "fit": ([], 1, "LlamaForCausalLM"),
    "ddp": (by_torchrun(2), 2, "DistributedDataParallel(LlamaForCausalLM)"),
    "fsdp2": (by_torchrun(2), 2, "FSDPLlamaForCausalLM"),
    "deepspeed": (by_torchrun(2), 2, "DeepSpeedEngine(LlamaForCausalLM)"),
    "accelerate": (ACCELERATE, 1, "LlamaForCausalLM"),
    "ray": ([], 2, "DistributedDataParallel(LlamaForCausalLM)"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_unchanged_to_the_same_bits_and_moves_bytes(name: str, tmp_path: Path) -> None:
    start, ranks, model = PROGRAMS[name]
    command = [*start, "-m", "matrix.programs", name]
    budget = ["-m", "tba", "run", "--allocator", "none", "--memory-budget", "1MiB", "--", sys.executable]
    results = []
    for arguments in (command, [*budget, *command]):
        status, printed = launch(arguments, tmp_path, LIMIT_S, **SMALL)
        assert status == 0, printed[-6000:]
        results.append({*re.findall(r"RESULT .*", printed)})  # Ray prints what a worker does twice
    assert len(results[0]) == ranks
    assert results[1] == results[0]
    begun = re.findall(r"tba: attached to (\S+) \(.* parameters\), .*memory_budget=1MiB", printed)
    assert begun == [model] * (2 if name == "ray" else 1)
    assert re.search(r"the first step saved .* MiB, .*: [\d.]+ [KM]iB went out of memory", printed)
