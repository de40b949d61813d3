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

Pieces = Sequence[tuple[int, int]]  # (address, nbytes), in file order


def _vectored(function: Callable[..., int], fd: int, pieces: Pieces, offset: int) -> int:
    vector = (_IoVec * len(pieces))(*(_IoVec(*piece) for piece in pieces))
    moved = function(fd, vector, len(pieces), offset)
    if moved < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return moved


def _pwritev(fd: int, pieces: Pieces, offset: int) -> int:
    return _vectored(_libc.pwritev, fd, pieces, offset)


def _preadv(fd: int, pieces: Pieces, offset: int) -> int:
    return _vectored(_libc.preadv, fd, pieces, offset)


def _fallocate(fd: int, offset: int, length: int) -> None:
    if _libc.fallocate(fd, 0, offset, length) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@dataclass(frozen=True, kw_only=True)
class Syscalls:
    """What a file store asks of the system. Each raises OSError; the vectored two return the bytes moved."""

    open: Callable[[str, int, int], int] = os.open
    close: Callable[[int], None] = os.close
    pwritev: Callable[[int, Pieces, int], int] = _pwritev
    preadv: Callable[[int, Pieces, int], int] = _preadv
    fallocate: Callable[[int, int, int], None] = _fallocate
