"""Runner: trains rows of the matrix with every arm, in this process or as one rank of several.

torchrun --nproc-per-node 2 -m matrix.runner OUT parallel:ddp parallel:fsdp2  (or: python -m matrix.runner OUT ROW ...)
"""

from __future__ import annotations

import faulthandler
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

from matrix.arms import ARMS, Arm, Cannot, Lacking, alive, equal

LIMIT_S = 300  # of one row


def main(out: str, *rows: str) -> None:
    """Train rows, one after another, in this process, which torchrun may have started as one of several.

    Where one of several ranks cannot go on, it ends, and torchrun ends the others: they may be waiting for it.
    """
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    for row in rows:
        went_on = run(row, folder_of(row, out), rank=int(os.environ.get("RANK", "0")))
        if dist.is_initialized():
            if not went_on:
                os._exit(1)
            dist.barrier()
    if dist.is_initialized():
        os._exit(0)  # past the end of torch's own threads, which aborts now and then


def folder_of(row: str, out: str) -> Path:
    """Where the ranks of a row leave what they have found."""
    return Path(out, row.replace(":", "-"))


def run(row: str, folder: Path, *, rank: int) -> bool:
    """Train with every arm, compare with the framework alone, and leave what was found in FOLDER/RANK.json.

    Ends the process, with its stacks on stderr, where that takes longer than LIMIT_S. Whether nothing was raised.
    """
    folder.mkdir(exist_ok=True)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.__stderr__)
    found = _train(row)
    faulthandler.cancel_dump_traceback_later()
    (folder / f"{rank}.json").write_text(json.dumps(found, indent=1))
    return not any("error" in arm for arm in found.values() if isinstance(arm, dict))


def _train(row: str) -> dict[str, Any]:
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
            if "accelerate" in sys.modules:  # what it has learned of the settings of the row before
                importlib.import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
            arm = Arm(name, budget_bytes, Path(scratch))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    train(arm)
                except Cannot as reason:
                    found["lacks" if isinstance(reason, Lacking) else "cannot"] = str(reason)
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
    return found


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
        "parameters_saved": arm.parameters_saved(),
    }


def _budget(arm: Arm) -> int:
    """Choose two thirds of what of a micro-batch can move, so that something must go."""
    assert arm.stats is not None
    return 2 * arm.stats.offloaded_bytes // (3 * max(1, arm.stats.micro_batches))


if __name__ == "__main__":
    main(*sys.argv[1:])
