"""The matrix: every framework, with every kind of settings, trains as it does alone."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from matrix.launch import HERE, by_torchrun, launch
from matrix.page import NOT_HERE
from matrix.runner import LIMIT_S, folder_of

# Module and function in `rows`, and the number of ranks.
ROWS = {
    "huggingface:trainer": 1,
    "huggingface:trainer_ddp": 2,
    "huggingface:lora_zero2": 2,
    "huggingface:sft": 1,
    "huggingface:dpo": 1,
    "huggingface:grpo": 1,
    "huggingface:lora": 1,
    "huggingface:lora_bf16": 1,
    "huggingface:lora_int8": 1,
    "huggingface:lora_nf4": 1,
    "lightning:fit": 1,
    "lightning:compiled": 1,
    "accelerate:ddp": 2,
    "accelerate:fsdp2": 2,
    "accelerate:zero2": 2,
    "deepspeed:zero0": 2,
    "deepspeed:zero1": 2,
    "deepspeed:zero2": 2,
    "deepspeed:zero3": 2,
    "deepspeed:zero3_cpu": 2,
    "deepspeed:zero3_nvme": 2,
    "parallel:ddp": 2,
    "parallel:fsdp1": 2,
    "parallel:fsdp2": 2,
    "parallel:fsdp2_offloads": 2,
    "parallel:tensor": 2,
    "parallel:sequence": 2,
    "parallel:tensor_fsdp2": 4,
    "pipeline:gpipe": 2,
    "pipeline:one_forward_one_backward": 2,
    "pipeline:interleaved": 2,
    "pipeline:zero_bubble": 2,
    "pipeline:zero_bubble_v": 2,
    "parallel:compiled": 1,
    "parallel:whole": 1,
    "huggingface:trainer_compiled": 1,
    "rays:trainer": 2,
    "megatron:pipeline": 2,
    "megatron:tensor": 2,
    "torchtitan:fsdp2": 2,
    "torchtitan:tensor": 2,
}
BY_RAY = {"rays:trainer"}
ALONE = {"megatron", "torchtitan"}  # frameworks whose state of a process is set up once
# Rows where something with a parameter's shape moves, as docs/limits.md says, and what it is.
WEIGHT_COPIES = {
    "huggingface:lora_bf16": "casts of frozen weights to bfloat16 move too",
    "huggingface:lora_int8": "what torchao makes of frozen weights in forward moves too",
}
FARTHEST_LOSS = 0.05  # of safe8 from the framework alone
START_S = 120  # of a launch: interpreters, imports, Ray


class Found(NamedTuple):
    """What a row has left: one result for each rank, and the end of what its processes have printed."""

    ranks: list[dict[str, Any]]
    printed: str


def launch_of(row: str) -> tuple[str, int]:
    """Rows of one file with as many ranks share their processes, whose imports take longer than a row."""
    module = row.partition(":")[0]
    return row if module in ALONE else module, ROWS[row]


@cache
def train(rows: tuple[str, ...], out: Path) -> dict[str, Found]:
    """Train rows in shared processes, once. What a launch that breaks off has not begun is launched again."""
    ranks, found = ROWS[rows[0]], {}
    start = ["-m", "matrix.rows.rays"] if rows[0] in BY_RAY else ["-m", "matrix.runner"]
    start = [*(by_torchrun(ranks) if ranks > 1 and rows[0] not in BY_RAY else []), *start]
    left = list(rows)
    while left:
        _, printed = launch([*start, str(out), *left], out, START_S + LIMIT_S * len(left))
        begun = [row for row in left if folder_of(row, str(out)).is_dir()] or left[:1]
        for row in begun:
            files = sorted(folder_of(row, str(out)).glob("*.json"))
            found[row] = Found([json.loads(file.read_text()) for file in files], printed[-6000:])
            left.remove(row)
    return found


@pytest.fixture(scope="session")
def found_by(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """Gives what a row has left, training it and those that share its processes, if they were asked for, first."""
    asked = dict.fromkeys(item.callspec.params["row"] for item in request.session.items if _is_cell(item))
    folders: dict[tuple[str, int], Path] = {}

    def find(row: str) -> Found:
        shared = launch_of(row)
        if shared not in folders:
            folders[shared] = tmp_path_factory.mktemp("matrix")
        return train(tuple(each for each in asked if launch_of(each) == shared), folders[shared])[row]

    return find


def _is_cell(item: Any) -> bool:
    return item.originalname == "test_it_trains_as_the_framework_does_alone"


def title_of(row: str) -> str:
    """The docstring of the row's function, which is its name on the page."""
    module, _, function = row.partition(":")
    tree = ast.parse((HERE / "rows" / f"{module}.py").read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    return ast.get_docstring(found) or row


@pytest.mark.parametrize("arm", ["nvme", "exact", "safe8", "auto"])
@pytest.mark.parametrize("row", ROWS)
def test_it_trains_as_the_framework_does_alone(
    row: str, arm: str, found_by: Callable[[str], Found], record_property: Callable[[str, object], None]
) -> None:
    def show(text: str) -> None:
        record_property("cell", (list(ROWS).index(row), title_of(row), arm, text))

    show("FAILED")
    ranks, printed = found_by(row)
    if len(ranks) < ROWS[row] and re.search(r"Timeout \(\d", printed):
        show(f"FAILED: took longer than {LIMIT_S} s")
    assert ranks, printed
    if reason := ranks[0].get("lacks"):
        show(f"{NOT_HERE}; {reason}")
        pytest.skip(reason)
    if reason := ranks[0].get("cannot"):
        show(f"cannot run; {reason}")
        pytest.skip(reason)
    for found in ranks:
        assert "error" not in found.get("alone", {}), found["alone"]["error"]
        assert arm in found, f"not reached: {next((r['error'] for r in found.values() if 'error' in r), found.keys())}"
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
        assert bool(result["parameters_saved"]) == (row in WEIGHT_COPIES), result["parameters_saved"]
        assert result["alive"] == []
    assert len(ranks) == ROWS[row], printed
    apart = max(found[arm]["loss_apart"] for found in ranks)
    moved_bytes = sum(found[arm]["offloaded_bytes"] for found in ranks)
    shown = "equal" if arm != "safe8" else f"within {apart:.1g}"
    show(f"{shown}, {moved_bytes / 2**20:.1f} MiB" + (f"; {WEIGHT_COPIES[row]}" if row in WEIGHT_COPIES else ""))


def test_what_a_launch_did_not_begin_is_launched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[list[str]] = []

    def breaks_off(arguments: list[str], folder: Path, limit_s: float) -> tuple[int, str]:
        rows = arguments[arguments.index(str(folder)) + 1 :]
        launches.append(rows)
        for row in rows[: 2 if len(launches) == 1 else 0]:
            folder_of(row, str(folder)).mkdir()
        return 1, f"printed {len(launches)}"

    monkeypatch.setitem(globals(), "launch", breaks_off)
    rows = ("parallel:ddp", "parallel:fsdp1", "parallel:fsdp2", "parallel:tensor")
    found = train(rows, tmp_path)
    assert launches == [list(rows), list(rows[2:]), list(rows[3:])]
    assert found == {row: Found([], f"printed {number}") for row, number in zip(rows, (1, 1, 2, 3), strict=True)}
