"""Worker: runs the cases it is asked for by seed, in a process of its own.

`python -m tests.campaigns.signals.worker DIRECTORY` serves the command `signals`.
"""

from __future__ import annotations

import gc
import random
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks._processes.serve import Tell, serve
from support.engine import engine
from tba import Offloader

from .trainee import Case, Trainee, run_case

# By name: the settings.
WAYS: dict[str, dict[str, Any]] = {
    "all moves": {"tier": "nvme", "prefetch_bytes": 0},
    "small window": {"tier": "nvme", "prefetch_bytes": 1 << 14, "staging_bytes": 1 << 15},
    "exact": {"tier": "nvme", "prefetch_bytes": 0, "compress": "exact"},
    "auto": {"tier": "auto", "memory_budget": 100 << 10},
    "auto exact": {"tier": "auto", "memory_budget": 100 << 10, "compress": "exact"},
    "fits": {"tier": "auto"},
}


class Worker:
    """Runs the cases it is asked for, in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        torch.set_num_threads(1)
        self._trainee = Trainee()
        gc.collect()
        gc.freeze()

    def answer(self, seed: int, tell: Tell) -> dict[str, Any]:
        """Run the case of a seed; return its way and kind, what was counted, and what was wrong."""
        numbers = random.Random(seed)
        way = numbers.choice(list(WAYS))
        case = Case.draw(numbers)

        def make(model: nn.Module) -> AbstractContextManager[Offloader]:
            return engine(self._directory, model=model, threads=2, **WAYS[way])

        run = run_case(self._trainee, case, make, numbers)
        wrong = f"{'; '.join(dict.fromkeys(run.wrong))} ({case})" if run.wrong else ""
        counts = {"handled": run.handled, "raised": len(run.raised), "caught": len(run.caught)}
        return {"way": way, "kind": case.kind, "detail": wrong, **counts}


if __name__ == "__main__":
    serve(Worker(Path(sys.argv[1])).answer)
