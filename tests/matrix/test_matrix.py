"""The matrix: every framework, with every kind of settings, trains as it does alone."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Module and function in `rows`, and the number of ranks.
ROWS = {
    "huggingface:trainer": 1,
    "huggingface:trainer_ddp": 2,
    "huggingface:sft": 1,
    "huggingface:dpo": 1,
    "huggingface:grpo": 1,
    "huggingface:lora": 1,
    "huggingface:lora_bf16": 1,
    "huggingface:lora_int8": 1,
    "lightning:fit": 1,
    "accelerate:ddp": 2,
    "accelerate:fsdp2": 2,
    "accelerate:zero2": 2,
    "deepspeed:zero0": 2,
    "deepspeed:zero1": 2,
    "deepspeed:zero2": 2,
    "deepspeed:zero3": 2,
    "parallel:ddp": 2,
    "parallel:fsdp2": 2,
    "parallel:tensor": 2,
    "parallel:tensor_fsdp2": 4,
    "parallel:pipeline": 2,
    "parallel:compiled": 1,
    "rays:trainer": 2,
    "megatron:pipeline": 2,
    "megatron:tensor": 2,
    "torchtitan:fsdp2": 2,
    "torchtitan:tensor": 2,
}
BY_RAY = {"rays:trainer"}
# Rows where something with a parameter's shape moves, as docs/limits.md says, and what it is.
WEIGHT_COPIES = {
    "huggingface:lora_bf16": "casts of frozen weights to bfloat16 move too",
    "huggingface:lora_int8": "what torchao makes of frozen weights in forward moves too",
}
FARTHEST_LOSS = 0.05  # of safe8 from the framework alone
LIMIT_S = 540


@cache
def train(row: str) -> list[dict[str, Any]]:
    """Train a row with every arm, once, in a process of its own or by torchrun. One result for each rank."""
    out = Path(os.environ["MATRIX_OUT"], row.replace(":", "-"))
    out.mkdir(parents=True)
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ROWS[row]}"] if ROWS[row] > 1 else []
    start = ["-m", "matrix.rows.rays"] if row in BY_RAY else [*ranks, "-m", "matrix.runner"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE.parent)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix, "torch_extensions")),  # DeepSpeed builds one, once
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",  # its workers import torch on a busy machine
    }
    command = [sys.executable, *start, row, str(out)]
    done = subprocess.run(
        command, cwd=out, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


@pytest.fixture(scope="session", autouse=True)
def _out(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["MATRIX_OUT"] = str(tmp_path_factory.mktemp("matrix"))


def title_of(row: str) -> str:
    """The docstring of the row's function, which is its name on the page."""
    module, _, function = row.partition(":")
    tree = ast.parse((HERE / "rows" / f"{module}.py").read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    return ast.get_docstring(found) or row


@pytest.mark.parametrize("arm", ["nvme", "exact", "safe8", "auto"])
@pytest.mark.parametrize("row", ROWS)
def test_it_trains_as_the_framework_does_alone(row: str, arm: str, cells: dict[tuple[str, str], str]) -> None:
    cell = title_of(row), arm
    cells[cell] = "FAILED"
    ranks = train(row)
    assert len(ranks) == ROWS[row]
    if reason := ranks[0].get("cannot"):
        cells[cell] = f"cannot run; {reason}"
        pytest.skip(reason)
    for found in ranks:
        assert "error" not in found.get("alone", {}), found["alone"]["error"]
        result = found[arm]
        assert "error" not in result, result["error"]
        assert len(result["losses"]) == 3
        if arm == "safe8":
            assert result["weights_finite"]
            assert result["loss_apart"] <= FARTHEST_LOSS
        else:
            assert result["losses"] == result["losses_alone"]
            assert result["weights_equal"]
        assert result["offloaded_bytes"] > 0
        assert result["errors"] == 0
        assert bool(result["parameter_writes"]) == (row in WEIGHT_COPIES), result["parameter_writes"]
        assert result["alive"] == []
    apart = max(found[arm]["loss_apart"] for found in ranks)
    moved_bytes = sum(found[arm]["offloaded_bytes"] for found in ranks)
    shown = "equal" if arm != "safe8" else f"within {apart:.1g}"
    cells[cell] = f"{shown}, {moved_bytes / 2**20:.1f} MiB" + (
        f"; {WEIGHT_COPIES[row]}" if row in WEIGHT_COPIES else ""
    )
