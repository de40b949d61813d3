"""Allocators: the `malloc` that a training on a CPU should run under, and the environment that selects it.

A step frees hundreds of large blocks and allocates them again. glibc keeps them in a heap that only shrinks at its end,
so memory that offloading frees stays resident; if it returns each block to the kernel instead, every page is faulted
again. jemalloc and mimalloc, set to keep freed pages for reuse, avoid both.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tba._errors import ConfigError

ALLOCATORS = ("auto", "jemalloc", "mimalloc", "glibc", "none")

# jemalloc: large blocks share the arena instead of returning to the kernel one by one, freed pages never age out, and
# memory is in huge pages (pinning it page by page is most of the CPU cost of a direct write). All threads share one
# arena: an arena does not reuse another's pages, and each would begin with its own huge pages (measured: 8 MiB for the
# few blocks that a compute thread and an I/O worker allocate). One thread of a step allocates the tensors. A block may
# be cut from a free one of any size: by default from one of at most 64 times its own, and as free blocks join those
# beside them and never age out, each step would take new pages for its smaller tensors, without end.
_JEMALLOC_CONF = (
    "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1,thp:always,narenas:1,lg_extent_max_active_fit:48"
)
# mimalloc 2.1 and later: never return freed pages to the kernel.
_MIMALLOC = {"MIMALLOC_PURGE_DELAY": "-1"}
# glibc: blocks of 1 MiB and more bypass the heap (setting this also keeps glibc from raising the limit); the heap keeps
# up to 64 MiB of smaller ones.
_GLIBC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}

_INSTALL = {
    "jemalloc": "install it (Debian and Ubuntu: apt-get install libjemalloc2)",
    "mimalloc": "install it (pip install 'tba-offload[mimalloc]')",
}
_KEEPS = "freed pages are kept and reused"


@dataclass(frozen=True)
class Allocator:
    """A chosen allocator.

    Attributes:
        name: "jemalloc", "mimalloc", "glibc", or "none" if nothing changes.
        library: the shared object to preload, by path or by the loader's name for it; None if none is needed.
        environment: variables to add to the environment it was chosen for.
        reason: why this one, for people.
    """

    name: str
    library: str | None
    environment: dict[str, str]
    reason: str


@dataclass(frozen=True)
class Libraries:
    """Libraries on the machine: those that work when preloaded, and why others do not."""

    libraries: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    glibc: bool = True


def allocator_environment(name: str = "auto", environ: Mapping[str, str] = os.environ) -> Allocator:
    """Choose the allocator to start a program under: with "auto" jemalloc, else mimalloc, else glibc tuned.

    Args:
        name: "auto", "jemalloc", "mimalloc", "glibc" (with tuned thresholds) or "none" (nothing changes).
        environ: the environment that the program would get. Its own settings of an allocator take precedence, and its
            `LD_PRELOAD` stays, behind the allocator.

    Raises:
        ConfigError: the name is unknown, or the allocator cannot be used here.
    """
    if name not in ALLOCATORS:
        raise ConfigError(f"unknown allocator {name!r}; choose one of {', '.join(ALLOCATORS)}")
    return choose(name, find_libraries(name, environ), environ)


def choose(name: str, found: Libraries, environ: Mapping[str, str]) -> Allocator:
    """Decide, from the libraries found and the environment."""
    if name == "none":
        return Allocator("none", None, {}, "the environment's allocator stays, as asked")
    allocators = (entry for entry in _preloaded(environ) if re.search(r"malloc|hoard", os.path.basename(entry)))
    present = next(allocators, None)
    if name == "auto" and present is not None:
        kind = next((kind for kind in _INSTALL if kind in os.path.basename(present)), "none")
        changes = preload_environment(kind, present, environ) if kind != "none" else {}
        return Allocator(kind, present, changes, "LD_PRELOAD has it already")
    if name == "glibc" and (present is not None or not found.glibc):
        why = f"LD_PRELOAD brings {present}; unset it" if present else "this Python does not run on glibc"
        raise ConfigError(f"allocator 'glibc' was asked for, but {why}, or choose 'none'")
    candidates = [kind for kind in _INSTALL if name in (kind, "auto")]
    missing = "; ".join(f"{kind}: {found.missing[kind]}" for kind in candidates if kind in found.missing)
    for kind in candidates:
        if library := found.libraries.get(kind):
            why = _KEEPS + (", as asked" if name != "auto" else "") + (f"; {missing}" if missing else "")
            return Allocator(kind, library, preload_environment(kind, library, environ), why)
    if name in _INSTALL:
        raise ConfigError(
            f"allocator {name!r} was asked for, but {found.missing.get(name, 'is not here')}; {_INSTALL[name]}, "
            "or choose another one"
        )
    if not found.glibc:
        return Allocator("none", None, {}, f"nothing better is installed ({missing})")
    why = "blocks of 1 MiB and more go back to the kernel when freed"
    why += ", as asked" if name == "glibc" else f"; slower than keeping them, but {missing}"
    return Allocator("glibc", None, _defaults(_GLIBC, environ), why)


def preload_environment(kind: str, library: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Compose the variables that start a program under `library`, in front of what is preloaded already."""
    already = [entry for entry in _preloaded(environ) if entry != library]
    changes = {"LD_PRELOAD": ":".join([library, *already])}
    if kind == "mimalloc":
        return changes | _defaults(_MIMALLOC, environ)
    conf = environ.get("MALLOC_CONF", "")
    if not conf.startswith(_JEMALLOC_CONF):
        # jemalloc takes the later of two values for an option, so the user's wins.
        conf = ",".join(filter(None, [_JEMALLOC_CONF, conf]))
    return changes | {"MALLOC_CONF": conf}


def _preloaded(environ: Mapping[str, str]) -> list[str]:
    return [entry for entry in re.split(r"[ :]+", environ.get("LD_PRELOAD", "")) if entry]


def _defaults(settings: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in settings.items() if not environ.get(name)}


def allocator_in_force(maps: str, environ: Mapping[str, str]) -> str:
    """Name the allocator of a process, from its `/proc/self/maps`: a library, "glibc tuned" or "glibc"."""
    libraries = (line.rpartition("/")[2] for line in maps.splitlines() if "/" in line)
    loaded = re.search(r"^lib(\w*malloc\w*|hoard)\b", "\n".join(libraries), flags=re.MULTILINE)
    if loaded is not None:
        return loaded[1]
    return "glibc tuned" if all(environ.get(name) for name in _GLIBC) else "glibc"


# -- effects ---------------------------------------------------------------------------------------------------------


def find_libraries(name: str, environ: Mapping[str, str]) -> Libraries:
    """Look for the libraries of `name`; try each by preloading it into a program that does nothing."""
    if not sys.platform.startswith("linux"):
        return Libraries(missing=dict.fromkeys(_INSTALL, "only preloaded on Linux"), glibc=False)
    missing: dict[str, str] = {}
    glibc = platform.libc_ver()[0] == "glibc"
    for kind in _INSTALL if name == "auto" else {name} & _INSTALL.keys():
        why = "is not installed"
        for file in dict.fromkeys(_library_files(kind, environ)):
            said = complaint(kind, file, environ)
            if said is None:
                return Libraries({kind: file}, missing, glibc)
            why = f"{file} cannot be used ({said})"
        missing[kind] = why
    return Libraries({}, missing, glibc)


def complaint(kind: str, library: str, environ: Mapping[str, str]) -> str | None:
    """Return what a program says when it starts under a library; None if it starts without complaint."""
    if re.search(r"[\s:]", library):
        return "LD_PRELOAD cannot hold a path with a space or colon"
    probe = shutil.which("true")
    if probe is None:
        return None
    alone = {name: value for name, value in environ.items() if name not in ("LD_PRELOAD", "MALLOC_CONF")}
    # The loader only complains about a library that it cannot load, and an old jemalloc about unknown options.
    result = subprocess.run(
        [probe], env=alone | preload_environment(kind, library, alone), capture_output=True, text=True, check=False
    )
    said = result.stderr.strip()
    if result.returncode == 0 and not said:
        return None
    return said.splitlines()[0] if said else f"a program under it ended with status {result.returncode}"


def _library_files(name: str, environ: Mapping[str, str]) -> list[str]:
    """List files and names to try, from its package, the loader, this environment and the usual directories."""
    packaged: Any = ()
    with suppress(importlib.metadata.PackageNotFoundError):
        packaged = importlib.metadata.files(f"cmeel-{name}") or ()
    files = [Path(str(file.locate())).resolve() for file in packaged]
    known = ctypes.util.find_library(name)
    roots = [sys.prefix, environ.get("CONDA_PREFIX", ""), "/usr/local", "/usr"]
    places = [Path(root, sub) for root in roots if root for sub in ("lib64", "lib")]
    files += [*([Path(known)] if known else []), *(file for place in places for file in sorted(place.glob("lib*.so*")))]
    return [str(file) for file in files if re.fullmatch(rf"lib{name}\.so(\.\d+)*", file.name)]
