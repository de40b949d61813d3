"""Extensions: what DeepSpeed builds with a C++ compiler, once, and may lack on this machine.

PYTHONPATH=tests python -m matrix.extensions   builds them before any row, whose limit a build may exceed
"""

from __future__ import annotations

import os

from benchmarks._workload.async_io import builder, compiles, lacking_for_files
from matrix.launch import ENVIRONMENT


def main() -> None:
    """Build what can be built, and say what cannot."""
    os.environ["TORCH_EXTENSIONS_DIR"] = ENVIRONMENT["TORCH_EXTENSIONS_DIR"]
    if compiles():
        builder("ShareMemCommBuilder").load(verbose=False)  # with which ranks of a node talk
    if reason := lacking_for_files():
        print(f"rows with files of DeepSpeed's own are skipped: {reason}")
    else:
        builder("AsyncIOBuilder").load(verbose=False)


if __name__ == "__main__":
    main()
