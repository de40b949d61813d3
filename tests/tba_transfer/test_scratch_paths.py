"""Scratch paths: which directory serves, which is refused, and what the refusal says."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tba import OffloadConfig, OffloadWarning, StorageError
from tba._transfer import scratch_paths
from tba._transfer.scratch_paths import (
    Mount,
    PathFacts,
    default_directories,
    free_disk_bytes,
    look_at,
    mount_of,
    refusal,
    storage_directories,
)

MOUNTS = [
    SimpleNamespace(mountpoint=point, fstype=kind, device=source)
    for point, kind, source in (
        ("/proc", "proc", "proc"),
        ("/", "ext4", "/dev/vda"),
        ("/dev/shm", "tmpfs", "tmpfs"),
        ("/mnt/data", "nfs4", "server:/export"),
        ("/mnt/data/local", "xfs", "/dev/nvme0n1"),
        ("/over", "tmpfs", "tmpfs"),
        ("/over", "ext4", "/dev/sdb1"),
        ("/swapdisk", "ext4", "/dev/zram0"),
    )
]
ON_DISK = Mount(point="/", kind="ext4", source="/dev/vda")


@pytest.mark.parametrize(
    ("path", "point", "kind"),
    [
        ("/home/user", "/", "ext4"),
        ("/", "/", "ext4"),
        ("/dev/shm", "/dev/shm", "tmpfs"),
        ("/dev/shm/a/b", "/dev/shm", "tmpfs"),
        ("/dev/shmoo", "/", "ext4"),  # a prefix of the name is not a parent
        ("/mnt/data/x", "/mnt/data", "nfs4"),
        ("/mnt/data/local/x", "/mnt/data/local", "xfs"),
        ("/over/x", "/over", "ext4"),  # the later mount is on top
    ],
)
def test_the_mount_is_the_longest_prefix(path: str, point: str, kind: str) -> None:
    found = mount_of(path, MOUNTS)
    assert (found.point, found.kind) == (point, kind)


def test_mounts_in_ram_and_over_a_network() -> None:
    assert [mount_of(path, MOUNTS).in_ram for path in ("/", "/dev/shm", "/swapdisk/x", "/mnt/data")] == [0, 1, 1, 0]
    assert [mount_of(path, MOUNTS).over_network for path in ("/", "/mnt/data", "/mnt/data/local")] == [0, 1, 0]


def test_no_mount_is_known_without_the_kernels_list() -> None:
    assert mount_of("/x", []) == Mount()
    assert refusal(PathFacts(path="/x", mount=Mount())) is None


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (PathFacts(path="/x", exists=False), "no such directory"),
        (PathFacts(path="/x", is_directory=False), "not a directory"),
        (PathFacts(path="/x", mount=mount_of("/dev/shm", MOUNTS)), r"/dev/shm, a file system in RAM \(tmpfs"),
        (PathFacts(path="/x", mount=mount_of("/swapdisk", MOUNTS)), "in RAM .*zram0"),
        (PathFacts(path="/x", mount=ON_DISK, read_only=True, writable=False), "read-only"),
        (PathFacts(path="/x", mount=ON_DISK, writable=False), "may not write"),
        (PathFacts(path="/x", mount=ON_DISK, free_bytes=4096), r"full \(4,096 bytes free\)"),
        (
            PathFacts(path="/x", mount=ON_DISK, trial="Permission denied"),
            r"cannot be written there \(Permission denied\)",
        ),
    ],
)
def test_refusals_say_what_was_found_and_what_to_do(facts: PathFacts, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(refusal(facts))
    assert ";" in str(refusal(facts))


def test_a_rank_without_the_directory_says_which_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(StorageError, match=r"no such directory(.|\n)*rank 3 of 8.*set TBA_STORAGE_PATHS"):
        storage_directories(OffloadConfig(storage_paths=tmp_path / "not"))


def test_several_directories_are_used_in_the_order_given(scratch: Path) -> None:
    one, two = scratch / "one", scratch / "two"
    one.mkdir()
    two.mkdir()
    assert [found.path for found in storage_directories(OffloadConfig(storage_paths=[two, one]))] == [two, one]
    assert storage_directories(OffloadConfig(storage_paths=[two, one]))[0].path == two


def test_each_of_several_that_cannot_serve_is_named(scratch: Path) -> None:
    (scratch / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        storage_directories(OffloadConfig(storage_paths=[scratch, scratch / "none", scratch / "file"]))
    first, second = str(caught.value).splitlines()
    assert first == f"storage path '{scratch / 'none'}': there is no such directory; make it or name another one"
    assert second.startswith(f"storage path '{scratch / 'file'}': it is not a directory")


def test_free_space_of_a_file_system_counts_once(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (scratch / "below").mkdir()
    monkeypatch.setattr(scratch_paths, "_free_bytes", lambda _: 1000)
    assert free_disk_bytes([scratch, scratch / "below"]) == 1000
    elsewhere = [path for path in ("/dev/shm", "/proc") if os.path.isdir(path)]
    assert free_disk_bytes([scratch, *elsewhere]) == 1000 * (1 + len(elsewhere))
    monkeypatch.setattr(scratch_paths, "_free_bytes", lambda _: None)
    assert free_disk_bytes([scratch]) is None
    with pytest.raises(OSError, match="No such file"):
        free_disk_bytes([scratch / "none"])


def test_what_is_found_at_a_path(scratch: Path) -> None:
    facts = look_at(scratch)
    assert (facts.path, facts.exists, facts.is_directory) == (os.path.realpath(scratch), True, True)
    assert (facts.trial, os.listdir(scratch)) == (None, [])  # a file was written there
    assert facts.device == scratch.stat().st_dev
    free_bytes = shutil.disk_usage(scratch).free  # others write meanwhile
    assert facts.free_bytes == pytest.approx(free_bytes, rel=0.2)
    assert free_disk_bytes([scratch]) == pytest.approx(free_bytes, rel=0.2)
    assert look_at(scratch / "none") == PathFacts(path=os.path.realpath(scratch / "none"), exists=False)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no RAM file system at /dev/shm")
def test_a_directory_in_ram_is_refused_also_behind_a_link(scratch: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as in_ram:
        link = scratch / "link"
        link.symlink_to(in_ram)
        for path in (in_ram, link):
            with pytest.raises(StorageError, match="in RAM"):
                storage_directories(OffloadConfig(storage_paths=path))[0]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_is_refused(scratch: Path) -> None:
    (scratch / "locked").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="may not write"):
        storage_directories(OffloadConfig(storage_paths=scratch / "locked"))[0]


@contextmanager
def mounted(point: Path, *arguments: str) -> Iterator[None]:
    """A file system mounted for a while; the test skips where that is not allowed."""
    point.mkdir()
    try:
        result = subprocess.run(["mount", *arguments, str(point)], capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"cannot mount here: {error}")
    if result.returncode:
        pytest.skip(f"cannot mount here: {result.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(point)], check=True)


def test_a_read_only_file_system_is_refused(scratch: Path) -> None:
    point = scratch / "read-only"
    with mounted(point, "--bind", str(scratch)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(point)], check=True)
        with pytest.raises(StorageError, match="read-only"):
            storage_directories(OffloadConfig(storage_paths=point))[0]
    assert storage_directories(OffloadConfig(storage_paths=point))[0].path == point


def test_a_full_file_system_is_refused(scratch: Path) -> None:
    image, point = scratch / "image", scratch / "full"
    image.write_bytes(bytes(8 << 20))
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4 here")
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
    with mounted(point, "-o", "loop", str(image)):
        assert storage_directories(OffloadConfig(storage_paths=point))[0].path == point
        with open(point / "filler", "wb") as filler:
            space = os.statvfs(point)
            os.posix_fallocate(filler.fileno(), 0, space.f_bfree * space.f_frsize - (512 << 10))
        with pytest.raises(StorageError, match="full"):
            storage_directories(OffloadConfig(storage_paths=point))[0]


def test_the_default_is_private_and_below_the_cache(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(scratch / "cache"))
    found = storage_directories(OffloadConfig())[0].path
    assert found == scratch / "cache" / "tba"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    found.chmod(0o755)
    assert storage_directories(OffloadConfig())[0].path == found
    assert stat.S_IMODE(found.stat().st_mode) == 0o700


def test_the_default_falls_back_to_the_temp_directory(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (scratch / "cache").write_text("a file where the cache should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(scratch / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert storage_directories(OffloadConfig())[0].path == scratch / f"tba-{os.getuid()}"


def test_somebody_elses_directory_is_not_used(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (scratch / "elsewhere").mkdir()
    (scratch / f"tba-{os.getuid()}").symlink_to(scratch / "elsewhere")
    monkeypatch.setattr(scratch_paths, "default_directories", lambda *_: (scratch / f"tba-{os.getuid()}",))
    with pytest.raises(StorageError, match="is a symbolic link") as caught:
        storage_directories(OffloadConfig())[0]
    assert "TBA_STORAGE_PATHS" in str(caught.value)


def test_where_the_defaults_are() -> None:
    directories = default_directories({"XDG_CACHE_HOME": "/c"}, "/home/u", "/tmp", 7)
    assert directories == (Path("/c/tba"), Path("/tmp/tba-7"), Path("/var/tmp/tba-7"))
    assert default_directories({}, "/home/u", "/tmp", 7)[0] == Path("/home/u/.cache/tba")
    assert default_directories({"XDG_CACHE_HOME": "relative"}, "/home/u", "/tmp", 7)[0] == Path("/home/u/.cache/tba")
    assert default_directories({}, "~", "/var/tmp", 7) == (Path("/var/tmp/tba-7"),)


def test_a_network_file_system_is_used_with_a_warning(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.path.realpath(scratch)
    mount = SimpleNamespace(mountpoint=real, fstype="nfs4", device="server:/x")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [mount])
    with pytest.warns(OffloadWarning, match="network file system"):
        assert storage_directories(OffloadConfig(storage_paths=scratch))[0].path == scratch
    mount.fstype = "ext4"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        storage_directories(OffloadConfig(storage_paths=scratch))
