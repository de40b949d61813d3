"""Builds the accelerator's C++ extension with the compiler that is there, once for all processes, and loads it.

What is built lies below the user's cache directory by the text of the sources and the versions of torch, Python and the
compiler; who comes second waits at a lock and loads what the first has made.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).with_name("source")
FLAGS = ("-O1", "-g0", "-std=c++20", "-Wall", "-DAT_PER_OPERATOR_HEADERS")


def compiler() -> str:
    """The C++ compiler, by its name or as `CXX` says."""
    return os.environ.get("CXX", "c++")


def why_not() -> str | None:
    """Why the accelerator cannot be built here; None where it can."""
    if sys.platform != "linux":
        return f"the accelerator made of a CPU needs Linux, and this is {sys.platform}"
    for tool in (compiler(), "ninja"):
        if shutil.which(tool) is None:
            return f"no {tool} on the PATH to build the accelerator made of a CPU with"
    if importlib.util.find_spec("setuptools") is None:
        return "no setuptools, which torch.utils.cpp_extension needs"
    return None


def key() -> str:
    """What a build depends on, as a name."""
    words = [torch.__version__, sys.version, *FLAGS]
    words.append(subprocess.run([compiler(), "--version"], check=True, capture_output=True, text=True).stdout)
    words += [file.name + file.read_text() for file in sorted(SOURCE.iterdir())]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def directory() -> Path:
    """Where builds are kept: `SIM_ACCELERATOR_CACHE`, or a directory of the user's below that for temporary files."""
    kept = os.environ.get("SIM_ACCELERATOR_CACHE")
    return Path(kept) if kept else Path(tempfile.gettempdir()) / f"tba-accelerator-{os.getuid()}"


def build() -> Path:
    """Build the extension unless it has been; its path. Raises RuntimeError with the compiler's words."""
    name = f"sim_{key()}"
    place = directory() / name
    place.mkdir(parents=True, exist_ok=True)
    library = place / f"{name}.so"
    with (place / "flock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the end of the process too
        if not (place / "done").exists():
            from torch.utils import cpp_extension

            os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))  # ninja's own is two more
            (place / "lock").unlink(missing_ok=True)  # PyTorch's own, of a build that was killed
            cpp_extension.load(
                name,
                [str(file) for file in sorted(SOURCE.glob("*.cpp"))],
                extra_cflags=list(FLAGS),
                build_directory=str(place),
                is_python_module=False,
            )
            for file in place.glob("*.o"):
                file.unlink()
            (place / "done").touch()
    return library


def load() -> ModuleType:
    """Build the extension unless it has been, and import it."""
    library = build()
    loader = importlib.machinery.ExtensionFileLoader(library.stem, str(library))
    spec = importlib.util.spec_from_loader(library.stem, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
