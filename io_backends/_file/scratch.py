"""Scratch file: a file without a name, so nothing is left behind however the process ends.

Opened with `O_TMPFILE` if the file system has it, else created and unlinked at once; mode 0600. Direct I/O if a trial
succeeds (with 512, then 4096 bytes of alignment), else buffered.

Stores that nobody uses any more may exhaust the process's descriptors: in a reference cycle, as models and trainers
are, a dropped store keeps its file until the next garbage collection.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from ctypes import addressof, c_char
from typing import NamedTuple

from .._errors import StoreBroken
from .syscalls import Syscalls

_O_TMPFILE = getattr(os, "O_TMPFILE", 0)
_O_DIRECT = getattr(os, "O_DIRECT", 0)
# Errors of open(2) on file systems without O_TMPFILE (EISDIR: kernels that do not know the flag).
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
# A dropped store's last worker closes the file shortly after the collection: seconds to wait before each retry.
_WAITS_S = (0.0, 0.001, 0.004, 0.016, 0.064, 0.256)
_COLLECT_EVERY_S = 60.0  # after a collection that freed no descriptor
_useless_s = float("-inf")  # when that last happened


class ScratchFile(NamedTuple):
    """An open, nameless file. `alignment` is 1 without direct I/O."""

    fd: int
    alignment: int

    @property
    def direct(self) -> bool:
        return self.alignment > 1


def open_scratch(directory: str, syscalls: Syscalls, device: int | None = None) -> ScratchFile:
    """Open a scratch file in `directory`. Raises StoreBroken naming the directory.

    `device`: `st_dev` of the file system that the directory was on when it was chosen; None for any.
    """
    scratch = _open(directory, syscalls)
    try:
        found = os.fstat(scratch.fd).st_dev
        # On overlayfs a file's number may differ from its directory's.
        if device is not None and device not in (found, os.stat(directory).st_dev):
            raise StoreBroken(
                f"{directory!r} was on device {_name(device)} when it was chosen and is on device {_name(found)} now: "
                "it has been replaced, or something was mounted over it; put it back, or name another directory"
            )
    except BaseException as error:
        syscalls.close(scratch.fd)
        if isinstance(error, OSError):
            raise StoreBroken(f"cannot make a scratch file in {directory!r}: {error}") from error
        raise
    return scratch


def lacks_descriptors(error: BaseException) -> bool:
    """Whether a file could not be opened because the process or the system has too many open."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)


def after_collection() -> Iterator[None]:
    """Collect garbage and yield a few times, while what the collection dropped is being closed.

    Finalizers run here, so hold no lock that they may need. Yields nothing if a recent collection did not help.
    """
    global _useless_s
    if time.monotonic() - _useless_s < _COLLECT_EVERY_S:
        return
    for wait_s in _WAITS_S:
        gc.collect()  # each time: what a finalizer held goes in the next collection
        time.sleep(wait_s)
        yield
    _useless_s = time.monotonic()


def _name(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _open(directory: str, syscalls: Syscalls) -> ScratchFile:
    try:
        if _O_DIRECT:
            try:
                fd = _open_nameless(directory, _O_DIRECT, syscalls)
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: the file system has no direct I/O
                    raise
            else:
                try:
                    for alignment in (512, 4096):
                        if _accepts(fd, alignment, syscalls):
                            return ScratchFile(fd, alignment)
                except BaseException:  # a full disk, Ctrl-C: each retry would leak a descriptor
                    syscalls.close(fd)
                    raise
                syscalls.close(fd)
        return ScratchFile(_open_nameless(directory, 0, syscalls), 1)
    except OSError as error:
        raise StoreBroken(f"cannot make a scratch file in {directory!r}: {error}") from error


def _open_nameless(directory: str, extra: int, syscalls: Syscalls) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | extra
    if _O_TMPFILE:
        try:
            return syscalls.open(directory, flags | _O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE or not os.path.isdir(directory):
                raise
    path = os.path.join(directory, f".tba-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        fd = syscalls.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        with suppress(OSError):  # O_DIRECT may be refused after the file was created
            os.unlink(path)
        raise
    try:
        os.unlink(path)
    except BaseException:
        syscalls.close(fd)
        raise
    return fd


def _accepts(fd: int, alignment: int, syscalls: Syscalls) -> bool:
    # The pieces start `alignment` bytes into a page, which fails if the file system requires more.
    page = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    try:
        anchor = c_char.from_buffer(page)
        address = addressof(anchor) + alignment
        del anchor
        try:
            pieces = [(address, alignment)]
            return (
                syscalls.pwritev(fd, pieces, alignment) == alignment
                and syscalls.preadv(fd, pieces, alignment) == alignment
            )
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    finally:
        page.close()
