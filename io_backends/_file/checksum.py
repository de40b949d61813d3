"""Checksums over memory by its address: of every byte, or of a sample that has a line of every page.

`every_byte` is XXH3 (64 bits). It is no defence against an enemy; against memory, cables and disks that flip bits it
errs once in 2**64. It runs at several bytes a cycle, far above any disk, and still takes as long as reading the memory.

`sampled` is the CRC-32 of 32 of every 4064 bytes, and of the last 32: at least one whole line of each page. It finds
writes that were lost, torn between pages or put elsewhere, and reads of something else, for about a tenth of the time;
not single bits, against which a disk has codes of its own. From page to page the lines move by 32 bytes, so that they
are not all of one channel, which may be zero. What fills no page is hashed whole. It makes few calls: between the
kernels of a step each takes many times what it does in a loop.

Both release the GIL over pieces of the size that stores move.

Source: Y. Collet, xxHash, https://github.com/Cyan4973/xxHash; PyPI package `xxhash`, an optional import: only stores
made with `checksum=True` need it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from .syscalls import memory_at

Digest = Callable[[int, int], int]  # of (address, nbytes)
_LINE, _PAGE = 32, 4096
_APART = _PAGE - _LINE
_line = np.dtype((np.void, _LINE))


def every_byte() -> Digest:
    """The function from (address, nbytes) to a checksum. Raises ImportError naming the package where it is missing."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise ImportError("checksum=True needs the package xxhash: pip install xxhash") from error

    return lambda address, nbytes: xxh3_64_intdigest(memory_at(address, nbytes))


def sampled(address: int, nbytes: int) -> int:
    """A checksum of a sample: 32 of every 4064 bytes, and the last ones."""
    memory = memory_at(address, nbytes)
    if nbytes <= _PAGE:
        return zlib.crc32(memory)
    lines = np.ndarray(((nbytes - _LINE) // _APART + 1,), _line, memory, 0, (_APART,))
    return zlib.crc32(memory[-_LINE:], zlib.crc32(lines.tobytes()))
