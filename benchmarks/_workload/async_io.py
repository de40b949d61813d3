"""Async I/O: the extension by which DeepSpeed reads and writes files, which it builds with a C++ compiler, once.

Importing this needs DeepSpeed.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from deepspeed.accelerator import get_accelerator


def lacking_for_files() -> str:
    """Say what this machine lacks for DeepSpeed's own files; "" if it lacks nothing."""
    if not compiles():
        return "a C++ compiler is missing, with which DeepSpeed builds async_io"
    if not builder("AsyncIOBuilder").is_compatible():
        return "libaio is missing, which DeepSpeed's async_io needs (apt-get install libaio-dev)"
    return ""


def compiles() -> bool:
    """Whether there is a C++ compiler."""
    return shutil.which(os.environ.get("CXX", "c++")) is not None


def builder(name: str) -> Any:
    """Return DeepSpeed's builder of an extension."""
    return get_accelerator().create_op_builder(name)
