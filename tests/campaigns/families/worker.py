"""Worker: trains the families it is asked for by name, in a process of its own.

`python -m tests.campaigns.families.worker DIRECTORY SEED` serves the command `families`.
"""

from __future__ import annotations

import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks._processes.serve import Tell, serve

from .catalog import families
from .trial import run_family

_MOST_BYTES = 8 << 30  # a model that is not small ends this process, not the machine


class Worker:
    """Trains families below `directory`, from `seed`."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory, self._seed = directory, seed
        self._families = {family.name: family for family in families()}
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))

    def answer(self, name: str, tell: Tell) -> dict[str, Any]:
        """Run the family of a name; return its outcome."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run_family(self._families[name], self._directory, self._seed).document()


if __name__ == "__main__":
    serve(Worker(Path(sys.argv[1]), int(sys.argv[2])).answer)
