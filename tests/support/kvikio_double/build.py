"""Builds the test double of libcuda.so.1 and runs Python where kvikio finds it. Nothing of it is ever installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("libcuda_double.c")


def compiler() -> str | None:
    """The C compiler, by its name or as `CC` says."""
    return shutil.which(os.environ.get("CC", "cc"))


def build(directory: Path) -> Path:
    """Compile the double into `directory`; its path. Raises CalledProcessError with the compiler's words."""
    library = directory / "libcuda.so.1"
    found = compiler()
    assert found is not None
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([found, *flags, "-o", str(library), str(SOURCE)], check=True, capture_output=True, text=True)
    return library


def cuda_libraries() -> list[str]:
    """Directories of NVIDIA's wheels, which kvikio's own search misses where they are not in site-packages."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    return sorted({str(file.parent) for root in roots for file in Path(root).glob("*/lib/libcufile.so.*")})


def python(library: Path | None, arguments: Sequence[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run this Python with the double as its CUDA driver, or with no driver at all."""
    path = [str(library.parent)] if library is not None else []
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVIKIO_")}
    environment["LD_LIBRARY_PATH"] = ":".join([*path, *cuda_libraries(), os.environ.get("LD_LIBRARY_PATH", "")])
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300)
