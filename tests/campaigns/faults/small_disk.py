"""A small file system of its own, mounted from a file, that really runs full. Linux, as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NotAllowed(RuntimeError):
    """A small file system cannot be had here; the message says why."""


@contextmanager
def small_disk(directory: Path, nbytes: int) -> Iterator[Path]:
    """Mount an empty ext4 of `nbytes`, kept in a file in `directory`; yield its mount point, and remove it at the end.

    Raises:
        NotAllowed: not root, a program is missing, or the system refuses.
    """
    if os.geteuid() != 0:
        raise NotAllowed("mounting a small file system needs root")
    image, point = directory / "small-disk.image", directory / "small-disk"
    point.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(nbytes)
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        try:
            _run("mount", "-o", "loop", str(image), str(point))
            shutil.rmtree(point / "lost+found")
            yield point
        finally:
            if point.is_mount():  # also where a signal ended the wait for the program that mounts
                _run("umount", str(point))
    finally:
        image.unlink(missing_ok=True)
        point.rmdir()


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotAllowed(f"{command[0]} cannot be run here: {error}") from error
    if done.returncode:
        raise NotAllowed(f"{' '.join(command)} is not allowed here: {done.stderr.strip()}")
