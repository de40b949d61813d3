"""Memory of the io benchmark: buffers to write from and read into, and the proof that a read brought what was written.

Every 512 bytes begin with a number that no other 512 bytes of any round have, so neither stale bytes of an earlier
round nor a sector out of place passes. Filling and comparing are no part of any measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from io_backends import Buffer, BufferPool

from .._report.results import CannotMeasure

_ALIGNMENT = 4096
_WORDS = 512 // 8  # the unit that is numbered, in words of 8 bytes


class WrongBytes(CannotMeasure):
    """What was read is not what was written: no figure of this run counts."""


class Memory:
    """`count` buffers of `nbytes` each, a multiple of 4096, in huge pages where the system gives them."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._pool = BufferPool(_ALIGNMENT)
        leases = [self._pool.lease(nbytes) for _ in range(count)]
        self.views = [view for view, _ in leases]
        self.buffers: list[Buffer] = [buffer for _, buffer in leases]
        self.words: list[npt.NDArray[np.uint64]] = [np.frombuffer(view, dtype=np.uint64) for view in self.views]
        self.read_over = 0  # so many of the first are the same few again and again

    def in_turn(self, count: int, start: int = 0) -> Memory:
        """As many buffers, but all except the last `count` are the same `count` in turn, as fio has one for each job.
        They are the `2 * count` from the one numbered `start` on.

        Those stay in the processor's caches, which alone makes reads of 4 MiB a tenth faster than into 512 MiB. What
        they hold in the end is anybody's: of two transfers, an earlier one may end later.
        """
        number = len(self.views)
        if number < start + 2 * count:
            return self
        turns = [start + index % count for index in range(number - count)]
        order = [*turns, *range(start + count, start + 2 * count)]
        few = copy(self)
        few.read_over = number - count
        few.views = [self.views[index] for index in order]
        few.buffers = [self.buffers[index] for index in order]
        few.words = [self.words[index] for index in order]
        return few

    @property
    def nbytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def fill(self, seed: int) -> None:
        """With noise, all of it."""
        random = np.random.default_rng(seed)
        for words in self.words:
            words[:] = random.integers(0, 1 << 64, words.size, dtype=np.uint64)

    def number(self, first: int) -> int:
        """Number every 512 bytes, from `first` on; the number after the last."""
        for words in self.words:
            count = words.size // _WORDS
            words[::_WORDS] = np.arange(first, first + count, dtype=np.uint64)
            first += count
        return first

    def wipe(self) -> None:
        """Take the numbers away: what is not read from here on shows."""
        for words in self.words:
            words[::_WORDS] = 0

    def close(self) -> None:
        """Give everything back."""
        self.words.clear()
        self.buffers.clear()
        self.views.clear()
        self._pool.close()


def verify(targets: Memory, sources: Sequence[npt.NDArray[np.uint64]], who: str) -> None:
    """Every byte of `targets` is that of `sources`, as far as they were not read over. Raises WrongBytes."""
    for index, (found, wanted) in enumerate(zip(targets.words, sources, strict=True)):
        if index >= targets.read_over and not np.array_equal(found, wanted):
            first = int(np.flatnonzero(found != wanted)[0]) * 8
            raise WrongBytes(
                f"{who}: buffer {index} of {len(sources)} differs from byte {first} on from what was written"
            )
