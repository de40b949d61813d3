"""The system calls beneath the stores, in one table that tests replace to make any of them fail.

Transfers go by address through libc (ctypes releases the GIL around a call), so memory of any origin works without a
Python buffer object for it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("pwritev", "preadv"):
    _function = getattr(_libc, _name)
    _function.argtypes = (ctypes.c_int, ctypes.POINTER(_IoVec), ctypes.c_int, ctypes.c_int64)
    _function.restype = ctypes.c_ssize_t
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int

for _name in ("pwrite", "pread"):
    _function = getattr(_libc, _name)
    _function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    _function.restype = ctypes.c_ssize_t

# fallocate(2): give the blocks of a range back, and leave the file's size as it is.
_KEEP_SIZE, _PUNCH_HOLE = 1, 2

Pieces = Sequence[tuple[int, int]]  # (address, nbytes), in file order


def _vectored(one: Callable[..., int], many: Callable[..., int]) -> Callable[[int, Pieces, int], int]:
    def move(fd: int, pieces: Pieces, offset: int) -> int:
        if len(pieces) == 1:  # most transfers; a vector costs several microseconds
            moved = one(fd, *pieces[0], offset)
        else:
            vector = (_IoVec * len(pieces))(*(_IoVec(*piece) for piece in pieces))
            moved = many(fd, vector, len(pieces), offset)
        if moved < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return moved

    return move


_pwritev = _vectored(_libc.pwrite, _libc.pwritev)
_preadv = _vectored(_libc.pread, _libc.preadv)


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
    """What a file store asks of the system. Each raises OSError.

    `pwritev` and `preadv` return the bytes moved, `allocated` those that the blocks of a file take.
    """

    open: Callable[[str, int, int], int] = os.open
    close: Callable[[int], None] = os.close
    pwritev: Callable[[int, Pieces, int], int] = _pwritev
    preadv: Callable[[int, Pieces, int], int] = _preadv
    fallocate: Callable[[int, int, int], None] = _fallocate
    punch: Callable[[int, int, int], None] = _punch
    allocated: Callable[[int], int] = _allocated
