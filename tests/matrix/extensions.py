"""Extensions: what DeepSpeed builds with a C++ compiler, once, and may lack on this machine.

PYTHONPATH=tests python -m matrix.extensions   builds them before any row, whose limit a build may exceed
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from deepspeed.accelerator import get_accelerator

from matrix.launch import ENVIRONMENT


def lacking_for_files() -> str:
    """Say what this machine lacks for DeepSpeed's own files; "" if it lacks nothing."""
    if not _compiles():
        return "a C++ compiler is missing, with which DeepSpeed builds async_io"
    if not _builder("AsyncIOBuilder").is_compatible():
        return "libaio is missing, which DeepSpeed's async_io needs (apt-get install libaio-dev)"
    return ""


def _compiles() -> bool:
    return shutil.which(os.environ.get("CXX", "c++")) is not None


def _builder(name: str) -> Any:
    return get_accelerator().create_op_builder(name)


def main() -> None:
    """Build what can be built, and say what cannot."""
    os.environ["TORCH_EXTENSIONS_DIR"] = ENVIRONMENT["TORCH_EXTENSIONS_DIR"]
    if _compiles():
        _builder("ShareMemCommBuilder").load(verbose=False)  # with which ranks of a node talk
    if reason := lacking_for_files():
        print(f"rows with files of DeepSpeed's own are skipped: {reason}")
    else:
        _builder("AsyncIOBuilder").load(verbose=False)


if __name__ == "__main__":
    main()
