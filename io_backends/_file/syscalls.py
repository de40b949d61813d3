"""The system calls beneath the stores, in a table that tests replace to make any of them fail.

Transfers go by address, through views that own nothing, so memory of any origin works. None of these calls holds the
GIL while the system works.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

if sys.platform != "linux":
    raise ImportError(f"tba and io_backends need Linux (O_DIRECT, fallocate, mbind); this is {sys.platform}")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int
# fallocate(2): free the blocks of a range and keep the file's size.
_KEEP_SIZE, _PUNCH_HOLE = 1, 2

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object
_PyBUF_WRITE = 0x200

Pieces = Sequence[tuple[int, int]]  # (address, nbytes), in file order


def memory_at(address: int, nbytes: int) -> memoryview:
    """A view of plain memory, which the caller keeps alive. Unlike a ctypes array it needs no type per size."""
    view: memoryview = _view(address, nbytes, _PyBUF_WRITE)
    return view


def _pwritev(fd: int, pieces: Pieces, offset: int) -> int:
    if len(pieces) == 1:  # most transfers
        return os.pwrite(fd, memory_at(*pieces[0]), offset)
    return os.pwritev(fd, [memory_at(*piece) for piece in pieces], offset)


def _preadv(fd: int, pieces: Pieces, offset: int) -> int:
    return os.preadv(fd, [memory_at(*piece) for piece in pieces], offset)


def _fallocate(fd: int, offset: int, length: int, mode: int = 0) -> None:
    if _libc.fallocate(fd, mode, offset, length) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _punch(fd: int, offset: int, length: int) -> None:
    _fallocate(fd, offset, length, _PUNCH_HOLE | _KEEP_SIZE)


def _allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@dataclass(frozen=True, kw_only=True)
class Syscalls:
    """The system calls of a file store. Each raises OSError.

    `pwritev` and `preadv` return bytes moved; `allocated` returns the bytes of a file's blocks.
    """

    open: Callable[[str, int, int], int] = os.open
    close: Callable[[int], None] = os.close
    pwritev: Callable[[int, Pieces, int], int] = _pwritev
    preadv: Callable[[int, Pieces, int], int] = _preadv
    fallocate: Callable[[int, int, int], None] = _fallocate
    punch: Callable[[int, int, int], None] = _punch
    allocated: Callable[[int], int] = _allocated
