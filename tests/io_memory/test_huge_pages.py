"""Pages of a pool: no more of them are in memory than leases have covered at one time, however those lie."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import numpy as np
import pytest

from io_backends import BufferPool
from io_backends._memory.huge_pages import Pages
from io_backends._memory.pool import Mapping

HUGE = 2 << 20
PAGE = mmap.PAGESIZE
PAGEMAP = Path("/proc/self/pagemap")


def in_memory(address: int, nbytes: int) -> list[int]:
    """Of each huge page from an address on, how many bytes are in memory (proc(5), pagemap)."""
    with PAGEMAP.open("rb") as file:
        file.seek(address // PAGE * 8)
        present = np.frombuffer(file.read(nbytes // PAGE * 8), np.uint64) >> np.uint64(63)
    return [int(count) * PAGE for count in present.reshape(-1, HUGE // PAGE).sum(axis=1)]


def test_pages_are_counted_once_and_the_highest_free_ones_go() -> None:
    pages = Pages(10, 95)

    def let_go(free: list[tuple[int, int]], most: int) -> list[int]:
        going = pages.idle(free, most)
        for offset in going:
            pages.gone(offset)
        return going

    assert pages.touch(0, 25) == 3
    assert pages.touch(5, 20) == 0
    assert pages.touch(29, 2) == 1
    assert pages.touched == {0, 1, 2, 3}
    assert let_go([(0, 19), (20, 75)], 1) == [30]
    assert let_go([(0, 19), (20, 75)], 5) == [20, 0], "page 1 is not wholly free, page 3 has gone"
    assert let_go([(5, 14)], 5) == []
    assert pages.touched == {1}
    assert pages.touch(0, 40) == 3
    assert pages.touch(85, 10) == 2
    assert let_go([(85, 9)], 5) == []
    assert let_go([(85, 10)], 5) == [90], "the range ends within the last page"


def test_memory_that_is_locked_stays_and_the_lease_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[tuple[int, ...]] = []

    def madvise(mapping: Mapping, *arguments: int) -> None:
        refused.append(arguments)
        raise OSError(errno.EINVAL, "locked")

    pool = BufferPool(4096)
    first = pool.lease(HUGE)
    second = pool.lease(HUGE)
    monkeypatch.setattr(Mapping, "madvise", madvise, raising=False)
    del first
    third = pool.lease(2 * HUGE)
    assert [(option, length) for option, _, length in refused] == [(mmap.MADV_DONTNEED, HUGE)]
    assert third[1].address == second[1].address + HUGE
    pool.close()


@pytest.mark.skipif(not PAGEMAP.exists(), reason="this system does not tell which pages are in memory")
def test_a_lease_that_does_not_fit_between_others_takes_pages_from_the_gaps() -> None:
    pool = BufferPool(4096)

    def filled(pages: int, value: int) -> np.ndarray:
        view, _ = pool.lease(pages * HUGE)
        array = np.frombuffer(view, np.uint8)
        array[:] = value
        leases[value] = view
        return array

    leases: dict[int, memoryview] = {}
    filled(4, 1)
    address = pool._segments[0].address
    filled(4, 2)
    del leases[1]
    filled(1, 3)
    small = filled(1, 4)
    del leases[2]
    large = filled(3, 5)
    del leases[3]
    assert in_memory(address, 10 * HUGE) == [HUGE] * 8 + [0] * 2
    last = filled(4, 6)  # gaps of one page and of three
    assert last.ctypes.data == address + 5 * HUGE
    assert in_memory(address, 10 * HUGE) == [0] + [HUGE] * 8 + [0], "the one it needed was given back"
    assert np.all(small == 4)
    assert np.all(large == 5)
    assert np.all(last == 6)
    first = filled(1, 7)
    assert first.ctypes.data == address
    assert in_memory(address, 10 * HUGE) == [HUGE] * 9 + [0], "none was free, and leases cover nine"
    pool.close()


@pytest.mark.skipif(not PAGEMAP.exists(), reason="this system does not tell which pages are in memory")
def test_no_more_stays_in_memory_for_leases_to_come_than_may_be_idle() -> None:
    pool = BufferPool(4096, idle_bytes=4 * HUGE)

    def step(pages: int) -> int:
        """Lease so many pages, one each; the bytes in memory when all have ended."""
        leases = [pool.lease(HUGE)[0] for _ in range(pages)]
        for view in leases:
            np.frombuffer(view, np.uint8)[:] = 1
        del leases, view
        pool.trim()
        return sum(sum(in_memory(segment.address, segment.memory.nbytes)) for segment in pool._segments)

    assert [step(pages) for pages in (3, 4, 10, 1, 10)] == [3 * HUGE, *[4 * HUGE] * 4]
    pool.close()
