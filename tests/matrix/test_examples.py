"""The examples: each runs at tiny size as it stands, and moves something."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from matrix.launch import ROOT, by_torchrun, launch

MODEL = "MODEL"  # stands for the folder of a tiny model
EXAMPLES = {
    "trainer": [MODEL],
    "trl_lora": [MODEL],
    "lightning_fit": [MODEL],
    "fsdp2_torchrun": [MODEL],
    "deepspeed_zero": [MODEL],
    "ray_train": [MODEL],
    "long_context": [MODEL, "512", "1MiB"],
    "convolutional": ["32"],
    "cpu_memory_cap": [MODEL, "1MiB"],
    "wave_inversion": ["--size", "32", "--steps", "60", "--memory-budget", "1MiB"],
    "what_checkpointing_changes": [],
    "plain_gpt": ["--layers", "2", "--width", "64", "--length", "64", "--batch", "4"],
}
BY_TORCHRUN = {"fsdp2_torchrun", "deepspeed_zero"}
UNDER_TBA_RUN = {"plain_gpt"}
LIMIT_S = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from matrix.models import llama, tokenizer

    folder = tmp_path_factory.mktemp("model")
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs_and_moves_something(name: str, model: Path, tmp_path: Path) -> None:
    environment = {
        "TBA_MIN_TENSOR_BYTES": "8KiB",
        "TBA_PREFETCH_BYTES": "32KiB",
        "TBA_STORAGE_PATHS": str(tmp_path),
    }
    arguments = [str(model) if argument == MODEL else argument for argument in EXAMPLES[name]]
    start = by_torchrun(2) if name in BY_TORCHRUN else []
    if name in UNDER_TBA_RUN:
        start = ["-m", "tba", "run", "--tier", "nvme", "--", sys.executable]
    command = [*start, str(ROOT / "examples" / f"{name}.py"), *arguments]
    status, printed = launch(command, tmp_path, LIMIT_S, **environment)
    assert status is not None, f"took longer than {LIMIT_S} s: {printed[-4000:]}"
    assert status == 0, printed[-4000:]
    moved = r"saved tensors .+( -> |held back)" if name in UNDER_TBA_RUN else r"handed to the tier +[\d.]+ [KMG]iB"
    assert re.search(moved, printed), printed[-2000:]
