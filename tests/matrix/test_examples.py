"""The examples: each runs at tiny size as it stands, and moves something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
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
}
BY_TORCHRUN = {"fsdp2_torchrun", "deepspeed_zero"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from matrix.rows.huggingface import llama, tokenizer

    folder = tmp_path_factory.mktemp("model")
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs_and_moves_something(name: str, model: Path, tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix, "torch_extensions")),  # DeepSpeed builds one, once
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",  # its workers import torch on a busy machine
        "TBA_MIN_TENSOR_BYTES": "8KiB",
        "TBA_PREFETCH_BYTES": "32KiB",
        "TBA_STORAGE_PATHS": str(tmp_path),
    }
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if name in BY_TORCHRUN else []
    arguments = [str(model) if argument == MODEL else argument for argument in EXAMPLES[name]]
    command = [sys.executable, *start, str(ROOT / "examples" / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"offloaded +[\d.]+ [KMG]iB", done.stdout + done.stderr), done.stdout[-2000:]
