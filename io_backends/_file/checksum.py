"""Checksums: XXH3 (64 bits) over memory by its address, without a copy.

XXH3 is no defence against an enemy; against memory, cables and disks that flip bits it errs once in 2**64. It runs at
several bytes a cycle, far above any disk, and `xxhash` releases the GIL over pieces of this size.

Source: Y. Collet, xxHash, https://github.com/Cyan4973/xxHash; PyPI package `xxhash`, an optional import: only stores
made with `checksum=True` need it.
"""

from __future__ import annotations

from collections.abc import Callable

from .syscalls import memory_at

Digest = Callable[[int, int], int]  # of (address, nbytes)


def digest() -> Digest:
    """The function from (address, nbytes) to a checksum. Raises ImportError naming the package where it is missing."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise ImportError("checksum=True needs the package xxhash: pip install xxhash") from error

    return lambda address, nbytes: xxh3_64_intdigest(memory_at(address, nbytes))
