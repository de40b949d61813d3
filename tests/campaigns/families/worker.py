"""Worker: trains the families it is asked for by name, in a process of its own.

`python -m tests.campaigns.families.worker DIRECTORY SEED [SHARE...]` serves the command `families`. Each share, of what
a plain step saves, is a budget.
"""

from __future__ import annotations

import logging
import resource
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks._processes.serve import Tell, serve

from .catalog import family_of
from .trial import SHARES, run_family

_MOST_BYTES = 8 << 30  # a model that is not small ends this process, not the machine


class Worker:
    """Trains families below `directory`, from `seed`, under budgets of these shares of what a plain step saves."""

    def __init__(self, directory: Path, seed: int, shares: Sequence[float]) -> None:
        self._directory, self._seed, self._shares = directory, seed, shares
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        logging.getLogger("tba").setLevel(logging.ERROR)
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))

    def answer(self, name: str, tell: Tell) -> dict[str, Any]:
        """Run the family of a name; return its outcome."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return asdict(run_family(family_of(name), self._directory, self._seed, self._shares))


if __name__ == "__main__":
    serve(Worker(Path(sys.argv[1]), int(sys.argv[2]), [float(each) for each in sys.argv[3:]] or SHARES).answer)
