"""Runner: trains one row of the matrix with every arm, in this process or as one rank of several.

torchrun --nproc-per-node 2 -m matrix.runner parallel:ddp OUT      (or: python -m matrix.runner huggingface:trainer OUT)
"""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from matrix.arms import ARMS, Arm, Cannot, alive, equal


def main(row: str, out: str) -> None:
    """Train in this process, which torchrun may have started as one of several."""
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    run(row, out, rank=int(os.environ.get("RANK", "0")))
    if dist.is_initialized():
        dist.barrier()
        os._exit(0)  # past the end of torch's own threads, which aborts now and then


def run(row: str, out: str, *, rank: int) -> None:
    """Train with every arm, compare with the framework alone, and leave what was found in OUT/RANK.json."""
    module, _, function = row.partition(":")
    train = getattr(importlib.import_module(f"matrix.rows.{module}"), function)
    found: dict[str, Any] = {}
    alone = Arm("alone", 0, Path())
    budget_bytes = 0
    with tempfile.TemporaryDirectory(prefix="matrix-") as scratch:
        for name in ARMS:
            torch.manual_seed(5)
            random.seed(5)
            np.random.seed(5)
            arm = Arm(name, budget_bytes, Path(scratch))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    train(arm)
                except Cannot as reason:
                    found["cannot"] = str(reason)
                    break
                except Exception:
                    found[name] = {"error": traceback.format_exc()}
                    break
            if name == "alone":
                alone = arm
                continue
            found[name] = _compare(arm, alone) | {
                "warnings": [str(w.message) for w in told if "tba" in str(w.category)]
            }
            if name == "nvme" and arm.stats is not None:
                budget_bytes = _budget(arm)
            del arm
            found[name]["alive"] = alive()
    Path(out, f"{rank}.json").write_text(json.dumps(found, indent=1))


def _compare(arm: Arm, alone: Arm) -> dict[str, Any]:
    stats = arm.stats
    return {
        "losses": arm.losses,
        "losses_alone": alone.losses,
        "weights_equal": equal(arm.weights, alone.weights),
        "weights_finite": all(bool(torch.isfinite(weight).all()) for weight in arm.weights.values()),
        "loss_apart": max((abs(a - b) for a, b in zip(arm.losses, alone.losses, strict=True)), default=math.inf),
        "offloaded_bytes": stats.offloaded_bytes if stats is not None else 0,
        "written_bytes": stats.written_bytes if stats is not None else 0,
        "errors": stats.errors if stats is not None else -1,
        "kept": dict(stats.kept_by_reason) if stats is not None else {},
        "recomputed": arm.recomputed,
        "parameter_writes": arm.parameter_writes(),
    }


def _budget(arm: Arm) -> int:
    """Choose two thirds of what of a micro-batch can move, so that something must go."""
    assert arm.stats is not None
    return 2 * arm.stats.offloaded_bytes // (3 * max(1, arm.stats.micro_batches))


if __name__ == "__main__":
    main(*sys.argv[1:])
