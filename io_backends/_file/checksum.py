"""Checksums of memory by address: of every byte, or of a sample with a line from every page.

`every_byte` is XXH3 (64 bits). It does not stop an attacker; it misses an accidental change once in 2**64. It handles
several bytes a cycle, far faster than any disk, but takes as long as reading the memory.

`sampled` is the CRC-32 of 32 of every 4064 bytes and of the last 32: at least one whole line of each page. For about a
tenth of the time it detects writes that were lost, torn between pages or misplaced, and reads of other data. It misses
single bits, for which a disk has its own codes. Lines move by 32 bytes from page to page, so they do not all fall into
one channel, which may be zero. Memory of up to a page is hashed whole. It makes few calls, because a call between the
kernels of a step takes many times what it takes in a loop.

Both release the GIL for pieces of the size that stores move.

Source: Y. Collet, xxHash, https://github.com/Cyan4973/xxHash. Only `checksum=True` imports the package `xxhash`.
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
    """Return XXH3 as a function of (address, nbytes). Raises ImportError if xxhash is missing."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise ImportError("checksum=True needs the package xxhash: pip install xxhash") from error

    return lambda address, nbytes: xxh3_64_intdigest(memory_at(address, nbytes))


def sampled(address: int, nbytes: int) -> int:
    """Checksum of a sample: 32 of every 4064 bytes, and the last 32."""
    memory = memory_at(address, nbytes)
    if nbytes <= _PAGE:
        return zlib.crc32(memory)
    lines = np.ndarray(((nbytes - _LINE) // _APART + 1,), _line, memory, 0, (_APART,))
    return zlib.crc32(memory[-_LINE:], zlib.crc32(lines.tobytes()))
