"""Extents against a trivial model: a list that says of every block whether it is in use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from io_backends import _extents
from io_backends._extents import Extents, align_up
from support.interrupts import interrupted_everywhere
from support.samples import examples

# The same examples every time and nothing written to disk: a failure here is a failure everywhere.
STEADY = settings(derandomize=True, database=None, deadline=None, max_examples=examples(60), stateful_step_count=60)


def end_of(extents: Extents) -> int:
    """Where the last range in use ends."""
    begin, length = (extents.free_ranges(0, extents._limit) or [(0, 0)])[-1]
    return begin if begin + length == extents._limit else extents._limit


class AgainstBlocks(RuleBasedStateMachine):
    """Every answer is that of first fit over single blocks."""

    @initialize(alignment=st.sampled_from([1, 512, 4096]), capacity_blocks=st.none() | st.integers(1, 40))
    def begin(self, alignment: int, capacity_blocks: int | None) -> None:
        self.alignment = alignment
        self.capacity_blocks = capacity_blocks
        # A capacity need not be a multiple of the alignment: what is over is no use.
        capacity = None if capacity_blocks is None else capacity_blocks * alignment + alignment // 2
        self.extents = Extents(alignment, capacity)
        self.blocks: list[bool] = []  # in use?
        self.live: list[tuple[int, int]] = []  # (offset, length) as given out and asked for

    def _lowest_fit(self, count: int) -> int | None:
        limit = len(self.blocks) + count if self.capacity_blocks is None else self.capacity_blocks
        for start in range(limit - count + 1):
            if not any(self.blocks[start : start + count]):
                return start
        return None

    def _mark(self, start: int, count: int, used: bool) -> None:
        self.blocks += [False] * (start + count - len(self.blocks))
        self.blocks[start : start + count] = [used] * count

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(1, 9 * self.alignment), label="length")
        count = align_up(length, self.alignment) // self.alignment
        start = self._lowest_fit(count)
        offset = self.extents.allocate(length)
        assert offset == (None if start is None else start * self.alignment)
        if start is not None and offset is not None:
            assert not any(self.blocks[start : start + count])
            self._mark(start, count, True)
            self.live.append((offset, length))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset, length = self.live.pop(data.draw(st.integers(0, len(self.live) - 1), label="which"))
        self.extents.free(offset, length)
        self._mark(offset // self.alignment, align_up(length, self.alignment) // self.alignment, False)

    @rule(start=st.integers(0, 50), count=st.integers(0, 30))
    def look_for_free_ranges(self, start: int, count: int) -> None:
        alignment = self.alignment
        expected: list[tuple[int, int]] = []
        for block in range(start, start + count):
            beyond = self.capacity_blocks is not None and block >= self.capacity_blocks
            if not beyond and (block >= len(self.blocks) or not self.blocks[block]):
                if expected and sum(expected[-1]) == block * alignment:
                    expected[-1] = (expected[-1][0], expected[-1][1] + alignment)
                else:
                    expected.append((block * alignment, alignment))
        assert self.extents.free_ranges(start * alignment, (start + count) * alignment) == expected

    @rule(start=st.integers(0, 50), count=st.integers(1, 12))
    def take(self, start: int, count: int) -> None:
        offset, length = start * self.alignment, count * self.alignment
        beyond = self.capacity_blocks is not None and start + count > self.capacity_blocks
        if beyond or any(self.blocks[start : start + count]):
            with pytest.raises(ValueError, match="is not free"):
                self.extents.take(offset, length)
            return
        self.extents.take(offset, length)
        self._mark(start, count, True)
        self.live.append((offset, length))

    @rule(start=st.integers(-2, 60), count=st.integers(1, 12), shift=st.sampled_from([0, 1, 100]))
    def free_what_is_not_in_use(self, start: int, count: int, shift: int) -> None:
        shift %= self.alignment
        wanted = [0 <= block < len(self.blocks) and self.blocks[block] for block in range(start, start + count)]
        assume(shift or not all(wanted))
        with pytest.raises(ValueError, match="not in use"):
            self.extents.free(start * self.alignment + shift, count * self.alignment)

    @precondition(lambda self: getattr(self, "capacity_blocks", None) is not None)
    @rule(more=st.integers(0, 20))
    def grow(self, more: int) -> None:
        self.capacity_blocks += more
        self.extents.grow(self.capacity_blocks * self.alignment + self.alignment // 2)

    @invariant()
    def sums_agree(self) -> None:
        if hasattr(self, "extents"):
            last_used = max((block + 1 for block, used in enumerate(self.blocks) if used), default=0)
            assert end_of(self.extents) == last_used * self.alignment
            assert self.extents.used_bytes == sum(self.blocks) * self.alignment


TestAgainstBlocks = AgainstBlocks.TestCase
TestAgainstBlocks.settings = STEADY


def test_a_periodic_load_of_any_sizes_reuses_the_same_range() -> None:
    extents = Extents(4096)
    sizes = [5000, 1, 123456, 4096, 70000, 8191]
    ends = []
    for _ in range(20):
        taken = [(extents.allocate(size), size) for size in sizes]
        ends.append(end_of(extents))
        for offset, size in reversed(taken):
            assert offset is not None
            extents.free(offset, size)
        assert (end_of(extents), extents.used_bytes) == (0, 0)
    assert set(ends) == {sum(align_up(size, 4096) for size in sizes)}


# Each with a range that touches free space on neither side, before, after and on both, and one at the end.
OPERATIONS: dict[str, Callable[[Extents], object]] = {
    "allocate a whole range": lambda extents: extents.allocate(1024),
    "allocate part of one": lambda extents: extents.allocate(512),
    "allocate at the end": lambda extents: extents.allocate(4096),
    "take from within one": lambda extents: extents.take(8192, 512),
    **{f"free {number}": lambda extents, number=number: extents.free(number * 1024, 1024) for number in (0, 2, 3, 5)},
    "free the last": lambda extents: extents.free(6 * 1024, 1024),
}


@pytest.mark.parametrize("operate", OPERATIONS.values(), ids=OPERATIONS)
def test_an_interrupt_at_any_bytecode_leaves_an_operation_done_or_not_done(
    operate: Callable[[Extents], object],
) -> None:
    def begun() -> Extents:
        """Seven ranges of 1024 in use, those numbered 1 and 4 free again."""
        extents = Extents(512)
        extents.take(0, 7 * 1024)
        for number in (1, 4):
            extents.free(number * 1024, 1024)
        return extents

    def known(extents: Extents) -> tuple[int, int, list[tuple[int, int]]]:
        return end_of(extents), extents.used_bytes, extents.free_ranges(0, 1 << 20)

    done = begun()
    operate(done)
    for place, extents in interrupted_everywhere(begun, operate, _extents):
        assert known(extents) in (known(begun()), known(done)), f"interrupted at bytecode {place}"
        for offset, length in extents.free_ranges(0, 1 << 20):  # all that is free can be had, and given back
            extents.take(offset, length)
            extents.free(offset, length)
        assert extents.allocate(1 << 20) == end_of(extents) - (1 << 20)


@pytest.mark.parametrize("length", [0, -512])
def test_lengths_are_positive(length: int) -> None:
    extents = Extents(512)
    extents.allocate(512)
    with pytest.raises(ValueError, match="length must be positive"):
        extents.allocate(length)
    with pytest.raises(ValueError, match="length must be positive"):
        extents.free(0, length)
    with pytest.raises(ValueError, match="alignment must be positive"):
        Extents(length)
