"""Checksums: XXH3 (64 bits) over memory by its address, without a copy.

XXH3 is no defence against an enemy; against memory, cables and disks that flip bits it errs once in 2**64. It runs at
several bytes a cycle, far above any disk, and `xxhash` releases the GIL over pieces of this size.

Source: Y. Collet, xxHash, https://github.com/Cyan4973/xxHash; PyPI package `xxhash`, an optional import: only stores
made with `checksum=True` need it.
"""

from __future__ import annotations

from collections.abc import Callable

from .._buffer import Buffer
from .syscalls import memory_at

# Small enough that an error says where to look, large enough that `xxhash` lets other threads run meanwhile.
CHUNK_BYTES = 4 << 20

Digest = Callable[[int, int], int]  # of (address, nbytes)


def digest() -> Digest:
    """The function from (address, nbytes) to a checksum. Raises ImportError naming the package where it is missing."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise ImportError("checksum=True needs the package xxhash: pip install xxhash") from error

    return lambda address, nbytes: xxh3_64_intdigest(memory_at(address, nbytes))


def chunks(nbytes: int) -> list[tuple[int, int]]:
    """The ranges of a buffer, each as begin and end, that have a checksum of their own."""
    return [(begin, min(begin + CHUNK_BYTES, nbytes)) for begin in range(0, nbytes, CHUNK_BYTES)]


def sums(digest: Digest, buffer: Buffer) -> tuple[int, ...]:
    """The checksums of a buffer's memory, one for each of its `chunks`."""
    return tuple(digest(buffer.address + begin, end - begin) for begin, end in chunks(buffer.nbytes))
