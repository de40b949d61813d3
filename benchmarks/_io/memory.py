"""Memory of the io benchmark, and the proof that a read returned what was written.

Every 512 bytes begin with a number that is unique over all rounds, so stale bytes of an earlier round and misplaced
sectors are found. Filling and comparing are not timed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from io_backends import Buffer, BufferPool

from .._report.results import CannotMeasure

Words = npt.NDArray[np.uint64]  # a buffer as numbers of 8 bytes

_ALIGNMENT = 4096
_NUMBERED = 512 // 8


class Memory:
    """`count` buffers of `nbytes` each, a multiple of 4096, in huge pages if the system has them."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._pool = BufferPool(_ALIGNMENT)
        leases = [self._pool.lease(nbytes) for _ in range(count)]
        self.buffers: list[Buffer] = [buffer for _, buffer in leases]
        self.words: list[Words] = [np.frombuffer(view, dtype=np.uint64) for view, _ in leases]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def fill(self, seed: int) -> None:
        """Fill all buffers with noise."""
        random = np.random.default_rng(seed)
        for words in self.words:
            words[:] = random.integers(0, 1 << 64, words.size, dtype=np.uint64)

    def number(self, first: int) -> int:
        """Number every 512 bytes, beginning with `first`; return the number after the last."""
        for words in self.words:
            count = words.size // _NUMBERED
            words[::_NUMBERED] = np.arange(first, first + count, dtype=np.uint64)
            first += count
        return first

    def close(self) -> None:
        """Release all buffers."""
        self.words.clear()
        self.buffers.clear()
        self._pool.close()


def wipe(found: Sequence[Words]) -> None:
    """Erase the numbers, so that whatever is not read afterwards shows."""
    for words in found:
        words[::_NUMBERED] = 0


def verify(found: Sequence[Words], written: Sequence[Words], who: str) -> None:
    """Compare every byte. Raises CannotMeasure."""
    for index, (one, other) in enumerate(zip(found, written, strict=True)):
        if not np.array_equal(one, other):
            first = int(np.flatnonzero(one != other)[0]) * 8
            what = f"buffer {index} of {len(found)} differs from byte {first} on from what was written"
            raise CannotMeasure(f"{who}: {what}")
