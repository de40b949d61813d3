"""Scratch paths: directories for scratch files, and why a directory is refused.

The facts of a path (`PathFacts`) are looked up once; pure functions of those facts decide whether it is usable.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from .._config import OffloadConfig
from .._errors import StorageError
from .._torch.user_frames import warn

_RAM_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
_RAM_DEVICES = ("/dev/ram", "/dev/zram")
_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "ncpfs", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs"}
)
_MIN_FREE_BYTES = 1 << 20  # less does not hold one saved tensor that is worth moving


@dataclass(frozen=True, kw_only=True)
class Mount:
    """Mounted file system that holds a path, in the kernel's words; "" if unknown."""

    point: str = ""
    kind: str = ""
    source: str = ""

    @property
    def in_ram(self) -> bool:
        """Whether its files take memory, so that writing there frees none."""
        return self.kind in _RAM_FILE_SYSTEMS or self.source.startswith(_RAM_DEVICES)

    @property
    def over_network(self) -> bool:
        return self.kind in _NETWORK_FILE_SYSTEMS


@dataclass(frozen=True, kw_only=True)
class PathFacts:
    """Facts of a path. `trial` is why a small file could not be written there; None if one could, or none was tried."""

    path: str
    exists: bool = True
    is_directory: bool = True
    writable: bool = True
    read_only: bool = False
    free_bytes: int | None = None  # None: the file system does not say
    device: int | None = None  # the file system's number (st_dev); None if the path does not exist
    mount: Mount = Mount()
    trial: str | None = None


class Directory(NamedTuple):
    """Directory for scratch files, and the number of the file system that it was on when checked."""

    path: Path
    device: int | None


def storage_directories(config: OffloadConfig) -> tuple[Directory, ...]:
    """Check the directories of `storage_paths`, or choose a private default and make it if missing.

    Without `storage_paths`: `tba` below `XDG_CACHE_HOME` or `~/.cache`, else `tba-<uid>` below the temp directory or
    /var/tmp, mode 0700, the first usable one.

    Raises:
        StorageError: a named path is missing, no directory, not writable, full or in RAM; or no default is usable.
    """
    if config.storage_paths is None:
        return (_default_directory(),)
    named = [(path, look_at(path)) for path in config.storage_paths]
    refused = [f"storage path {str(path)!r}: {reason}" for path, facts in named if (reason := refusal(facts))]
    if refused:
        raise StorageError("\n".join(refused) + _of_rank(os.environ))
    return tuple(_accepted(path, facts) for path, facts in named)


def free_disk_bytes(directories: Iterable[str | os.PathLike[str]]) -> int | None:
    """Free bytes of the file systems that hold existing directories, each counted once; None if one does not say.

    Raises:
        OSError: a directory does not exist.
    """
    free: dict[int, int | None] = {}
    for directory in directories:
        free[os.stat(directory).st_dev] = _free_bytes(os.statvfs(directory))
    known = [nbytes for nbytes in free.values() if nbytes is not None]
    return sum(known) if len(known) == len(free) else None


def _default_directory() -> Directory:
    tried = []
    for path in default_directories(os.environ, os.path.expanduser("~"), tempfile.gettempdir(), os.getuid()):
        reason, facts = make_private(path), look_at(path)
        reason = reason or refusal(facts)
        if reason is None:
            return _accepted(path, facts)
        tried.append(f"{path}: {reason}")
    raise StorageError(
        "no default directory can hold the scratch file; name one on a disk with storage_paths or TBA_STORAGE_PATHS. "
        "Tried " + "; ".join(tried)
    )


def _of_rank(environment: Mapping[str, str]) -> str:
    """Say which rank, on which machine, has refused: the others wait for it at their next collective."""
    rank, ranks = environment.get("RANK"), environment.get("WORLD_SIZE", "1")
    if rank is None or ranks == "1":
        return ""
    return (
        f"\nThis is rank {rank} of {ranks}, on {os.uname().nodename}: every node needs the directory; make it on each "
        "(`srun mkdir -p ...`), or set TBA_STORAGE_PATHS on each to one that it has"
    )


def refusal(facts: PathFacts) -> str | None:
    """Decide why a path cannot hold scratch files, and what to do about it; None if it can."""
    if not facts.exists:
        return "there is no such directory; make it or name another one"
    if not facts.is_directory:
        return "it is not a directory; name one"
    if facts.mount.in_ram:
        return (
            f"it is on {facts.mount.point}, a file system in RAM ({facts.mount.kind} on {facts.mount.source}), where "
            "offloading frees no memory; name a directory on a disk"
        )
    if facts.read_only:
        return "its file system is mounted read-only; name a directory that can be written"
    if not facts.writable:
        return "this user may not write there; change its mode or name another directory"
    if facts.free_bytes is not None and facts.free_bytes < _MIN_FREE_BYTES:
        return f"its file system is full ({facts.free_bytes:,} bytes free); free some space or name another directory"
    if facts.trial is not None:
        return f"a file cannot be written there ({facts.trial}); name a directory on a disk"
    return None


def mount_of(path: str, mounts: Iterable[Any]) -> Mount:
    """Find the mount that holds an absolute path without symbolic links, in a list of `psutil.disk_partitions`."""
    above = [m for m in mounts if Path(path).is_relative_to(m.mountpoint)]
    # Of two mounts at one point, the later is on top.
    top = max(reversed(above), key=lambda mount: len(mount.mountpoint), default=None)
    return Mount(point=top.mountpoint, kind=top.fstype, source=top.device) if top is not None else Mount()


def default_directories(environment: Mapping[str, str], home: str, temporary: str, user_id: int) -> tuple[Path, ...]:
    """List the directories to try without a storage path, the preferred one first."""
    cache = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the specification says to ignore relative ones
        cache = os.path.join(home, ".cache")
    # The temp directory is often in RAM, /var/tmp by convention never.
    shared = [Path(place, f"tba-{user_id}") for place in dict.fromkeys((temporary, "/var/tmp"))]
    return (*([Path(cache, "tba")] if os.path.isabs(cache) else []), *shared)  # relative if no home is known


def look_at(path: str | os.PathLike[str]) -> PathFacts:
    real = os.path.realpath(path)
    try:
        found = os.stat(real)
        space = os.statvfs(real)
    except OSError:
        return PathFacts(path=real, exists=False)
    facts = PathFacts(
        path=real,
        is_directory=stat.S_ISDIR(found.st_mode),
        writable=os.access(real, os.W_OK | os.X_OK),
        read_only=bool(space.f_flag & os.ST_RDONLY),
        free_bytes=_free_bytes(space),
        device=found.st_dev,
        mount=mount_of(real, _mounts()),
    )
    return facts if refusal(facts) else replace(facts, trial=_try_to_write(real))


def _try_to_write(directory: str) -> str | None:
    """Write a page to an unnamed file and read it back; returns why that failed. /proc and /sys only seem writable."""
    page = b"tba." * 1024
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(page)
            file.seek(0)
            return None if file.read() == page else "other bytes came back"
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return None  # not the directory's fault; the store collects what is dropped, and tries again
        return error.strerror or type(error).__name__


def _free_bytes(space: os.statvfs_result) -> int | None:
    """Free bytes, without those reserved for the superuser; None if the file system does not say."""
    if not space.f_blocks:
        return None
    if space.f_files and not space.f_favail:
        return 0  # no inode is left for the file
    return space.f_bavail * space.f_frsize


def make_private(path: Path, *, directory: bool = True) -> str | None:
    """Make a directory or an empty file for this user alone, or check one that another user may have made first.

    Returns:
        Why it is unusable; None if it is usable.
    """
    try:
        if directory:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            # Do not open an existing file: closing it would drop the locks that SQLite holds on it in this process.
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        found = path.lstat()
        if not (stat.S_ISDIR if directory else stat.S_ISREG)(found.st_mode):
            return f"is a symbolic link, or no {'directory' if directory else 'file'}"
        if found.st_uid != os.getuid():
            return f"belongs to user {found.st_uid}"
        if found.st_mode & 0o077:
            path.chmod(0o700 if directory else 0o600)
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    return None


def _accepted(path: Path, facts: PathFacts) -> Directory:
    if facts.mount.over_network:
        warn(
            f"storage path {facts.path!r} is on {facts.mount.point}, a network file system ({facts.mount.kind}): "
            "expect waits; name a directory on a local disk with storage_paths or TBA_STORAGE_PATHS"
        )
    return Directory(path, facts.device)


def _mounts() -> list[Any]:
    try:
        return psutil.disk_partitions(all=True)
    except OSError:
        return []  # no /proc: no mount is refused for its type
