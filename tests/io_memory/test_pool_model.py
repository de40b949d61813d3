"""BufferPool and HostArena against a trivial model, over any order of leases and ends that hypothesis thinks of.

The model is a list of the leases that are held. Each is filled with a number of its own, so an overlap shows twice: in
the addresses, and in bytes that changed.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from io_backends import Buffer, BufferPool, StoreFull
from io_backends._memory import pool
from io_backends._memory.arena import HostArena
from support.samples import examples

PAGE = mmap.PAGESIZE
SEGMENT = 8 * PAGE
BUDGET = 24 * PAGE

Step = tuple[str, int, int]

ALIGNMENTS = st.sampled_from([1, 64, 512, PAGE, 2 * PAGE])
# Sizes around blocks, pages, the segment and the budget, where arithmetic goes wrong, and anything between.
SIZES = st.one_of(
    st.integers(0, 3 * SEGMENT),
    st.builds(
        lambda size, odd: max(0, size + odd), st.sampled_from([512, PAGE, SEGMENT, 2 * SEGMENT]), st.integers(-2, 2)
    ),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("lease"), SIZES, st.integers(0, 2 * PAGE)),
        st.tuples(st.just("end"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("trim"), st.just(0), st.just(0)),
    ),
    max_size=40,
)
model = settings(derandomize=True, deadline=None, max_examples=examples(150))


class Model:
    """What is held, beside the pool under test.

    Attributes:
        most_covered: the most pages (of `_pool`) that leases covered at one time.
    """

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self.held: list[tuple[int, memoryview, Buffer]] = []
        self.addresses: list[int] = []
        self.refused: list[int] = []
        self.most_covered = 0
        self._number = 0

    def run(self, steps: Sequence[Step]) -> None:
        for kind, first, second in steps:
            if kind == "lease":
                self.lease(first, second % self.pool.alignment)
            elif kind == "end" and self.held:
                self.end(first % len(self.held))
            elif kind == "trim":
                self.pool.trim()
            self.check()

    def lease(self, nbytes: int, skew: int) -> None:
        try:
            view, buffer = self.pool.lease(nbytes, skew)
        except StoreFull:
            self.refused.append(self.blocks_bytes(skew, nbytes))
            return
        assert view.nbytes == buffer.nbytes == nbytes
        assert buffer.address % self.pool.alignment == skew
        assert buffer.padded
        assert buffer.owner is view
        self._number += 1
        view[:] = bytes([self._number % 256]) * nbytes
        self.held.append((self._number % 256, view, buffer))
        self.addresses.append(buffer.address)

    def end(self, index: int) -> None:
        number, view, _ = self.held.pop(index)
        assert np.all(np.frombuffer(view, np.uint8) == number)

    def check(self) -> None:
        align = self.pool.alignment
        blocks = sorted(
            (b.address // align * align, b.address // align * align + self.blocks_bytes(b.address % align, b.nbytes))
            for _, _, b in self.held
        )
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(blocks))
        assert self.pool.leased_bytes == sum(end - begin for begin, end in blocks) <= self.pool.mapped_bytes
        if self.pool.budget_bytes is not None:
            assert self.pool.mapped_bytes <= self.pool.budget_bytes
        self.check_pages(blocks)

    def check_pages(self, blocks: Sequence[tuple[int, int]]) -> None:
        """A page that a lease covers counts as touched, and no more do than were covered at some time."""
        page = pool._HUGE_PAGE_BYTES
        covered = {number for begin, end in blocks for number in range(begin // page, -(-end // page))}
        self.most_covered = max(self.most_covered, len(covered))
        touched = {s.address // page + number for s in self.pool._segments for number in s.pages.touched}
        assert covered <= touched
        if self.pool._gives_back:
            assert len(touched) <= self.most_covered

    def blocks_bytes(self, skew: int, nbytes: int) -> int:
        """Bytes of the whole blocks that a lease owns, at least one."""
        return -(-max(1, skew + nbytes) // self.pool.alignment) * self.pool.alignment

    def end_all(self) -> None:
        while self.held:
            self.end(0)
        assert self.pool.leased_bytes == 0


@pytest.fixture(scope="module", autouse=True)
def small_pages() -> Iterator[None]:
    """A segment of four of them instead of a sixteenth of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_HUGE_PAGE_BYTES", 2 * PAGE)
        yield


@model
@given(ALIGNMENTS, STEPS)
def test_a_pool_without_a_budget_refuses_nothing_and_mixes_nothing_up(alignment: int, steps: list[Step]) -> None:
    pool = Model(BufferPool(alignment, SEGMENT))
    pool.run(steps)
    assert pool.refused == []
    pool.end_all()


@model
@given(ALIGNMENTS, STEPS)
def test_the_same_leases_a_second_time_lie_in_the_same_memory(alignment: int, steps: list[Step]) -> None:
    """Full reuse: a step like the last one maps nothing and touches no new page."""
    steps = [step for step in steps if step[0] != "trim"]
    pool = BufferPool(alignment, SEGMENT)
    first = Model(pool)
    first.run(steps)
    first.end_all()
    mapped_bytes = pool.mapped_bytes
    second = Model(pool)
    second.most_covered = first.most_covered
    second.run(steps)
    assert second.addresses == first.addresses
    assert pool.mapped_bytes == mapped_bytes


@model
@given(ALIGNMENTS, STEPS, st.integers(0, 2 * PAGE))
def test_an_arena_keeps_its_budget_and_refuses_only_what_has_no_room(
    alignment: int, steps: list[Step], skew: int
) -> None:
    pinned: dict[int, int] = {}
    arena = HostArena(
        BUDGET + 77,
        alignment=alignment,
        segment_bytes=SEGMENT,
        register=pinned.__setitem__,
        unregister=pinned.__delitem__,
    )
    pool = Model(arena)
    for step in steps:
        in_use = arena.leased_bytes > 0
        refused = len(pool.refused)
        pool.run([step])
        assert sum(pinned.values()) == arena.pinned_bytes == arena.mapped_bytes <= BUDGET
        if len(pool.refused) > refused:  # with nothing on lease only what is larger than the budget is refused
            assert in_use or pool.refused[-1] > BUDGET
    pool.end_all()
    skew %= alignment
    pool.lease(BUDGET // alignment * alignment - skew, skew)
    assert len(pool.held) == 1, "all had ended, so the whole budget was free"
    pool.end_all()
    arena.close()
    assert pinned == {}
