"""Worker: runs the programs it is asked for by seed, in a process of its own.

`python -m tests.campaigns.state.worker DIRECTORY [KIND]` serves the command `state`.
"""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks._processes.serve import Tell, serve

from .program import draw
from .trial import run_program

_EVERY = 50  # programs between two collections: their models are in reference cycles


class Worker:
    """Runs programs below `directory`; with states of one kind, if one is named."""

    def __init__(self, directory: Path, kind: str | None) -> None:
        self._directory, self._kind = directory, kind
        torch.set_num_threads(1)
        logging.getLogger("tba").setLevel(logging.ERROR)
        gc.freeze()

    def answer(self, seed: int, tell: Tell) -> dict[str, Any]:
        """Run the program of a seed; return its outcome."""
        if seed % _EVERY == 0:
            gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return asdict(run_program(draw(seed, self._kind), self._directory))


if __name__ == "__main__":
    serve(Worker(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None).answer)
