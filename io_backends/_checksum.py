"""Checksums: XXH3 (64 bits) over memory by its address, without a copy.

XXH3 is no defence against an enemy; against memory, cables and disks that flip bits it errs once in 2**64. It runs at
several bytes a cycle, far above any disk, and `xxhash` releases the GIL over pieces of this size.

Source: Y. Collet, xxHash, https://github.com/Cyan4973/xxHash; PyPI package `xxhash`, an optional import: only stores
made with `checksum=True` need it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from . import _layout
from ._extents import align_up
from ._store import Buffer, Location

_PyBUF_READ = 0x100
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object

Digest = Callable[[int, int], int]  # of (address, nbytes)
Sums = dict[int, int]  # chunk index to checksum


def digest() -> Digest:
    """The function from (address, nbytes) to a checksum. Raises ImportError naming the package where it is missing."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise ImportError("checksum=True needs the package xxhash: pip install xxhash") from error

    def of_memory(address: int, nbytes: int) -> int:
        # A memoryview by this way needs no ctypes type of its length, each of which would be kept for ever.
        return xxh3_64_intdigest(_view(address, nbytes, _PyBUF_READ))

    return of_memory


def sums(digest: Digest, buffer: Buffer, location: Location, block: int, part: _layout.Part) -> Sums:
    """The checksums, over the buffer's memory, of the chunks that one part of a transfer consists of."""
    found: Sums = {}
    for index in _layout.chunks_of(part, align_up(location.skew + location.nbytes, block), block):
        first, last = _layout.chunk_payload(index, location.skew, location.nbytes, block)
        found[index] = digest(buffer.address + first, last - first)
    return found
