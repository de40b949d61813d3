"""Scratch file: created without a name, so that nothing is left behind however the process ends.

`O_TMPFILE` where the file system has it, else created and unlinked at once; mode 0600. Direct I/O where it works,
found by trying (512, then 4096 bytes of alignment), else buffered.

A process may run out of descriptors because of stores that nobody uses any more: dropped in a reference cycle, as
models and trainers are, each keeps its file until the next garbage collection.
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
# What open(2) answers where a file system has no O_TMPFILE (EISDIR: kernels that do not know the flag).
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


# A dropped store's last worker closes the file, some moments after the collection. Seconds to wait before each look.
_WAITS_S = (0.0, 0.001, 0.004, 0.016, 0.064, 0.256)
_COLLECT_EVERY_S = 60.0  # where it was of no use
_useless_s = float("-inf")  # when it last was


class ScratchFile(NamedTuple):
    """An open, nameless file. `alignment` is 1 where direct I/O is not to be had."""

    fd: int
    alignment: int

    @property
    def direct(self) -> bool:
        return self.alignment > 1


def open_scratch(directory: str, syscalls: Syscalls, device: int | None = None) -> ScratchFile:
    """Open a scratch file in `directory`. Raises StoreBroken naming the directory.

    `device`: the number of the file system (`st_dev`) the directory was on when it was chosen; None for any.
    """
    scratch = _open(directory, syscalls)
    try:
        found = os.fstat(scratch.fd).st_dev
        # Where layers are laid over one another (overlayfs) a file may have another number than its directory.
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
    """Whether a file could not be opened because this process, or the system, has too many open."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)


def after_collection() -> Iterator[None]:
    """Collect garbage, and go on a few times, while what that has dropped is being closed.

    Finalisers run in it: hold no lock that they may want. It goes on not even once where a collection was of no use a
    short while ago.
    """
    global _useless_s
    if time.monotonic() - _useless_s < _COLLECT_EVERY_S:
        return
    for wait_s in _WAITS_S:
        gc.collect()  # each time: what has a finaliser lets go of what it holds in the next one
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
                except BaseException:  # a full disk, Ctrl-C: many may try again, and each would leave a descriptor
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
        with suppress(OSError):  # direct I/O is refused only after the file has been made
            os.unlink(path)
        raise
    try:
        os.unlink(path)
    except BaseException:
        syscalls.close(fd)
        raise
    return fd


def _accepts(fd: int, alignment: int, syscalls: Syscalls) -> bool:
    # The pieces start `alignment` bytes into a page, so a stricter requirement shows itself.
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
