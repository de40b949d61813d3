"""Free memory: bytes this process may still take, by the machine and by its cgroups.

In a container the cgroup limit is below the machine's memory, and neither the C library nor psutil reports it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import psutil

# Limits and the process's place among the cgroups hardly ever change; what is used is read at every call.
_REFRESH_S = 1.0
# cgroup v1 writes "no limit" as the largest multiple of a page; no machine has so much.
_NO_LIMIT_BYTES = 1 << 60


class _Files(NamedTuple):
    """The files of a cgroup, and the lines of its memory.stat that count the page cache."""

    limits: tuple[str, ...]
    use: str
    reclaimable: tuple[str, str]


_FILES = {
    1: _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    # Above memory.high the kernel stalls the process so long that it is a limit too.
    2: _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
}


class CgroupMount(NamedTuple):
    """Mount of a hierarchy that may have the memory controller; `root` is the cgroup that shows as its root."""

    version: int
    root: str
    point: str


class Level(NamedTuple):
    """One cgroup with a limit: the process's own or one above it, whose limit covers all below."""

    limit_bytes: int
    use_file: str
    stat_file: str
    reclaimable: tuple[str, str]  # lines of memory.stat that count page cache, which is dropped before a kill


def free_bytes() -> int:
    """Bytes this process may still take: the least of the machine's available memory and of each cgroup's rest.

    A cgroup's rest is its limit less its use, where file cache that can be dropped does not count as used. Limits are
    read again once a second.
    """
    least = int(psutil.virtual_memory().available)
    for level in _levels():
        try:
            used, stat = int(_read(level.use_file)), _read(level.stat_file)
        except (OSError, ValueError):
            continue  # the cgroup has just been removed; the next lookup finds the present one
        least = min(least, level.limit_bytes - used + sum(stat_value(stat, key) for key in level.reclaimable))
    return max(0, least)


def total_bytes() -> int:
    """Bytes this process may take in all: the least of the machine's memory and of its cgroups' limits."""
    return min([_machine_total_bytes(), *(level.limit_bytes for level in _levels())])


# -- pure parsers ----------------------------------------------------------------------------------------------------


def cgroup_mounts(mountinfo: str) -> tuple[CgroupMount, ...]:
    """Parse the mounted hierarchies that may hold a memory controller from the text of `/proc/self/mountinfo`."""
    found = re.finditer(r"^(?:\S+ ){3}(\S+) (\S+) .* - (cgroup2?) \S+ (\S+)$", mountinfo, flags=re.MULTILINE)
    return tuple(
        CgroupMount(2 if kind == "cgroup2" else 1, root, point)
        for root, point, kind, options in (match.groups() for match in found)
        if kind == "cgroup2" or "memory" in options.split(",")
    )


def cgroup_paths(cgroup: str) -> dict[int, str]:
    """Parse the process's cgroup in each version's hierarchy from the text of `/proc/self/cgroup`."""
    paths = {}
    for number, controllers, path in re.findall(r"^(\d+):([^:]*):(.*)$", cgroup, flags=re.MULTILINE):
        if "memory" in controllers.split(","):
            paths[1] = path
        elif number == "0" and not controllers:
            paths[2] = path
    return paths


def cgroup_directories(mount: CgroupMount, path: str) -> tuple[str, ...]:
    """List the directories of a cgroup and of those above it, innermost first, as far as the mount shows them.

    In a container the mount shows only a part of the tree: `root` is then the path of that part, or the given path
    leads out of it ("/.."), and only the mount point is left.
    """
    root = "" if mount.root == "/" else mount.root
    if path != root and not path.startswith(root + "/"):
        return (mount.point,)
    inner = [part for part in path[len(root) :].split("/") if part]
    if ".." in inner:
        return (mount.point,)
    return tuple("/".join([mount.point.rstrip("/"), *inner[:depth]]) for depth in range(len(inner), -1, -1))


def limit_of(text: str) -> int | None:
    """Parse the bytes that a limit file allows; None for no limit."""
    text = text.strip()
    if not text.isdigit() or int(text) >= _NO_LIMIT_BYTES:
        return None
    return int(text)


def stat_value(text: str, key: str) -> int:
    """Parse the number after `key` at the start of a line of a memory.stat; 0 where there is none."""
    found = re.search(rf"^{key} (\d+)", text, flags=re.MULTILINE)
    return int(found[1]) if found is not None else 0


# -- effects ---------------------------------------------------------------------------------------------------------


def find_levels(read: Callable[[str], str]) -> tuple[Level, ...]:
    """Find the cgroups that limit this process. `read` returns a file's text, or raises OSError."""
    try:
        paths = cgroup_paths(read("/proc/self/cgroup"))
        mounts = cgroup_mounts(read("/proc/self/mountinfo"))
    except OSError:
        return ()  # no cgroups here
    known = [(mount, paths[mount.version]) for mount in mounts if mount.version in paths]
    return tuple(level for mount, path in known for level in _levels_of(mount, path, read))


def _levels_of(mount: CgroupMount, path: str, read: Callable[[str], str]) -> Iterator[Level]:
    files = _FILES[mount.version]
    for depth, directory in enumerate(cgroup_directories(mount, path)):
        # In version 1, without use_hierarchy, a cgroup's limit covers itself alone.
        if depth and _text(read, f"{directory}/memory.use_hierarchy").strip() == "0":
            return
        found = (limit_of(_text(read, f"{directory}/{name}")) for name in files.limits)
        if limits := [limit for limit in found if limit is not None]:
            yield Level(min(limits), f"{directory}/{files.use}", f"{directory}/memory.stat", files.reclaimable)


def _text(read: Callable[[str], str], path: str) -> str:
    try:
        return read(path)
    except OSError:
        return ""  # the root cgroup has no such file, and a hierarchy without the controller has none at all


_known_levels: tuple[float, tuple[Level, ...]] = (-_REFRESH_S, ())


def _levels() -> tuple[Level, ...]:
    global _known_levels
    looked_s, levels = _known_levels
    now_s = time.monotonic()
    if now_s - looked_s >= _REFRESH_S:
        levels = find_levels(_read)
        _known_levels = (now_s, levels)
    return levels


@cache
def _machine_total_bytes() -> int:
    return int(psutil.virtual_memory().total)


def _read(path: str) -> str:
    with open(path, errors="surrogateescape") as file:
        return file.read()
