"""Free memory: the kernel's texts, the limits of nested cgroups, and a real cgroup seen from inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tba._device import memory as device_memory
from tba._memory import free_memory
from tba._memory.free_memory import CgroupMount, cgroup_directories, cgroup_mounts, cgroup_paths, find_levels

MIB = 1 << 20
V1_MOUNTS = """31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V1_PATHS = "5:cpu,cpuacct:/\n4:memory:/outer/inner\n1:name=systemd:/\n0::/\n"
V2_MOUNTS = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
NO_LIMIT_V1 = "9223372036854771712\n"


def reader(files: dict[str, str]) -> Callable[[str], str]:
    def read(path: str) -> str:
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    return read


def test_mounts_with_a_memory_controller() -> None:
    assert cgroup_mounts(V1_MOUNTS) == (
        CgroupMount(1, "/", "/sys/fs/cgroup/memory"),
        CgroupMount(2, "/", "/sys/fs/cgroup/unified"),
    )
    assert cgroup_mounts("no such line\n") == ()


def test_paths_of_the_process() -> None:
    assert cgroup_paths(V1_PATHS) == {1: "/outer/inner", 2: "/"}
    assert cgroup_paths("0::/user.slice/a:b\n") == {2: "/user.slice/a:b"}
    assert cgroup_paths("4:memory,hugetlb:/x\n") == {1: "/x"}
    assert cgroup_paths("") == {}


@pytest.mark.parametrize(
    ("root", "path", "directories"),
    [
        ("/", "/a/b", ("/m/a/b", "/m/a", "/m")),
        ("/", "/", ("/m",)),
        ("/docker/7f", "/docker/7f", ("/m",)),  # the container's own cgroup is the root of what it sees
        ("/docker/7f", "/docker/7f/job", ("/m/job", "/m")),
        ("/docker/7f", "/docker/7fff", ("/m",)),  # a longer name is not a child
        ("/docker/7f", "/elsewhere", ("/m",)),
        ("/", "/../other", ("/m",)),  # moved out of the namespace's root
    ],
)
def test_directories_from_the_process_up_to_the_mount(root: str, path: str, directories: tuple[str, ...]) -> None:
    assert cgroup_directories(CgroupMount(1, root, "/m"), path) == directories


@pytest.mark.parametrize(
    ("text", "limit"), [("629145600\n", 629145600), ("max\n", None), (NO_LIMIT_V1, None), ("", None), ("-1\n", None)]
)
def test_limits(text: str, limit: int | None) -> None:
    assert free_memory.limit_of(text) == limit


def test_numbers_in_the_kernels_tables() -> None:
    stat = "inactive_file 7\ntotal_inactive_file 4096\ntotal_active_file 8192"
    assert free_memory.stat_value(stat, "inactive_file") == 7
    assert free_memory.stat_value(stat, "total_active_file") == 8192
    assert free_memory.stat_value(stat, "active_file") == 0  # the end of another name is not the name


def test_v1_finds_every_limit_above_the_process() -> None:
    at = "/sys/fs/cgroup/memory"
    files = {
        "/proc/self/cgroup": V1_PATHS,
        "/proc/self/mountinfo": V1_MOUNTS,
        f"{at}/outer/inner/memory.limit_in_bytes": NO_LIMIT_V1,
        f"{at}/outer/memory.limit_in_bytes": "1000\n",
        f"{at}/outer/memory.use_hierarchy": "1\n",
        f"{at}/memory.limit_in_bytes": NO_LIMIT_V1,
        f"{at}/memory.use_hierarchy": "1\n",
    }
    (level,) = find_levels(reader(files))
    assert (level.limit_bytes, level.use_file) == (1000, f"{at}/outer/memory.usage_in_bytes")
    files[f"{at}/outer/memory.use_hierarchy"] = "0\n"  # then the outer limit is for the outer group alone
    assert find_levels(reader(files)) == ()


def test_v2_finds_every_limit_above_the_process() -> None:
    at = "/sys/fs/cgroup"
    files = {
        "/proc/self/cgroup": "0::/pod/container\n",
        "/proc/self/mountinfo": V2_MOUNTS,
        f"{at}/pod/container/memory.max": "max\n",
        f"{at}/pod/container/memory.high": "500\n",
        f"{at}/pod/memory.max": "2000\n",
        f"{at}/pod/memory.high": "max\n",
    }
    levels = find_levels(reader(files))
    assert [(level.limit_bytes, level.stat_file) for level in levels] == [
        (500, f"{at}/pod/container/memory.stat"),
        (2000, f"{at}/pod/memory.stat"),
    ]


def test_a_machine_without_cgroups_has_no_limits() -> None:
    assert find_levels(reader({})) == ()
    assert find_levels(reader({"/proc/self/cgroup": "", "/proc/self/mountinfo": ""})) == ()


def levels_in(directory: Path, *limits: tuple[int, int, int]) -> tuple[free_memory.Level, ...]:
    """Files as the kernel would write them, for (limit, use, file cache) from the inside out."""
    levels = []
    for number, (limit, use, cache) in enumerate(limits):
        use_file, stat_file = directory / f"use{number}", directory / f"stat{number}"
        use_file.write_text(f"{use}\n")
        stat_file.write_text(f"inactive_file {cache // 4}\nactive_file {cache - cache // 4}\n")
        levels.append(free_memory.Level(limit, str(use_file), str(stat_file), ("inactive_file", "active_file")))
    return tuple(levels)


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        ([(100, 30, 0)], 70),
        ([(100, 90, 80)], 90),  # what the page cache holds is free
        ([(100, 30, 0), (200, 190, 0)], 10),  # a neighbour has filled the outer group
        ([(100, 120, 0)], 0),
    ],
)
def test_free_is_the_least_of_all_limits(
    limits: list[tuple[int, int, int]], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = levels_in(tmp_path, *limits)
    monkeypatch.setattr(free_memory, "_levels", lambda: levels)
    assert free_memory.free_bytes() == free
    assert free_memory.total_bytes() == min(limit for limit, _, _ in limits)


def test_a_cgroup_that_has_gone_limits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = free_memory.Level(1, str(tmp_path / "gone"), str(tmp_path / "gone"), ("x", "y"))
    monkeypatch.setattr(free_memory, "_levels", lambda: (gone,))
    assert free_memory.free_bytes() > MIB


def test_limits_are_looked_up_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    monkeypatch.setattr(free_memory, "find_levels", lambda read: (looks.append(read), ())[1])
    monkeypatch.setattr(free_memory, "_known_levels", (float("-inf"), ()))
    now_s = 100.0
    monkeypatch.setattr(free_memory.time, "monotonic", lambda: now_s)
    for _ in range(3):
        free_memory.free_bytes()
    assert len(looks) == 1
    now_s += 10
    free_memory.free_bytes()
    assert len(looks) == 2


def test_never_more_than_the_machine_has() -> None:
    assert 0 < free_memory.free_bytes() <= psutil.virtual_memory().total
    assert free_memory.free_bytes() <= free_memory.total_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("driver_free", "reserved", "allocated", "split", "fraction", "left"),
    [(100, 50, 20, 0, 1.0, 130), (100, 50, 20, 0, 0.06, 40), (0, 20, 20, 0, 0.01, 0), (100, 50, 20, 25, 1.0, 105)],
)
def test_what_a_device_has_left(
    driver_free: int,
    reserved: int,
    allocated: int,
    split: int,
    fraction: float,
    left: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (driver_free, 1000))
    statistics = {
        f"{kind}_bytes": {"all": {"current": nbytes, "peak": nbytes}}
        for kind, nbytes in (("reserved", reserved), ("allocated", allocated), ("inactive_split", split), ("active", 7))
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: statistics)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fraction)
    assert device_memory.figures(torch.device("cuda", 0)) == (left, 7, 7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device_counts_what_the_allocator_holds_unused() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kept = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    with_it = device_memory.figures(device).free_bytes
    del kept  # stays reserved by PyTorch
    assert abs(device_memory.figures(device).free_bytes - with_it - 256 * MIB) < 64 * MIB
    assert torch.cuda.memory_reserved(device) >= 256 * MIB


# -- a real cgroup ---------------------------------------------------------------------------------------------------

INSIDE = """
import json, os, sys, time
directory, scratch = sys.argv[1:]
with open(f"{directory}/inner/cgroup.procs", "w") as procs:
    procs.write(str(os.getpid()))
from tba._memory import free_memory
MIB = 1 << 20
seen = {"total": free_memory.total_bytes(), "before": free_memory.free_bytes()}
block = bytearray(os.urandom(1)) * (96 * MIB)
seen["holding"] = free_memory.free_bytes()
del block
seen["released"] = free_memory.free_bytes()
with open(f"{scratch}/cached", "wb") as file:
    file.write(bytes(96 * MIB))
    file.flush()
    os.fsync(file.fileno())
deadline = time.monotonic() + 60
while True:  # the kernel folds its counts per CPU together every two seconds
    seen["cached"] = free_memory.free_bytes()
    with open(f"{directory}/memory.usage_in_bytes") as file:
        seen["usage"] = int(file.read())
    with open(f"{directory}/memory.stat") as file:
        stat = dict(line.split() for line in file)
    seen["file"] = int(stat["total_inactive_file"]) + int(stat["total_active_file"])
    if abs(seen["cached"] - seen["released"]) < 32 * MIB or time.monotonic() > deadline:
        break
    time.sleep(0.1)
print(json.dumps(seen))
"""


@pytest.fixture
def limited_cgroup() -> Iterator[Path]:
    """A v1 memory cgroup below our own, limited to 640 MiB, with an unlimited one inside."""
    mount = next((mount for mount in cgroup_mounts(read("/proc/self/mountinfo")) if mount.version == 1), None)
    path = cgroup_paths(read("/proc/self/cgroup")).get(1)
    if mount is None or path is None:
        pytest.skip("no v1 memory controller is mounted here")
    outer = Path(cgroup_directories(mount, path)[0]) / f"tba-test-{os.getpid()}"
    try:
        (outer / "inner").mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"cgroups cannot be made here: {error}")
    try:
        (outer / "memory.limit_in_bytes").write_text(str(640 * MIB))
        yield outer
    finally:
        (outer / "inner").rmdir()
        outer.rmdir()


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def test_a_real_cgroup_seen_from_inside(limited_cgroup: Path, scratch: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", INSIDE, str(limited_cgroup), str(scratch)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["total"] == 640 * MIB
    assert seen["before"] < 640 * MIB
    assert 90 * MIB < seen["before"] - seen["holding"] < 102 * MIB
    assert 90 * MIB < seen["released"] - seen["holding"] < 102 * MIB
    # The page cache of a written file counts as used by the cgroup, and as free here. How much of the file is still
    # cached is for the kernel to say: one that reclaims ahead of need may have dropped it.
    assert abs(seen["cached"] - (640 * MIB - seen["usage"] + seen["file"])) < 16 * MIB
    assert abs(seen["cached"] - seen["released"]) < 32 * MIB
