"""Layout against brute force: whatever the address and size, a transfer moves every byte once."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from io_backends._extents import align_up
from io_backends._file import layout
from support.samples import examples

STEADY = settings(derandomize=True, database=None, deadline=None, max_examples=examples(300))
BOUNCE = 1 << 50  # far from any buffer below


@given(
    block=st.sampled_from([1, 512, 4096]),
    skew=st.integers(0, 4095),
    nbytes=st.one_of(st.integers(1, 20_000), st.integers(1, 1 << 25)),
)
@STEADY
def test_a_vector_covers_memory_once_and_whole_blocks_of_the_extent(block: int, skew: int, nbytes: int) -> None:
    skew %= block
    address = 7 * 4096 + skew
    pieces, edges = layout.vector(address, skew, nbytes, block, BOUNCE)
    assert sum(size for _, size in pieces) == align_up(skew + nbytes, block)
    moved: list[tuple[int, int]] = []  # ranges of memory, in file order
    at = {inside // block: (outside, size) for inside, outside, size in edges}
    for start, size in pieces:
        assert start % block == size % block == 0
        if start >= BOUNCE:
            outside, inner = at.pop(start // block)
            moved.append((outside, outside + inner))
        else:
            moved.append((start, start + size))
    assert at == {}
    assert moved[0][0] == address
    assert moved[-1][1] == address + nbytes
    assert all(before[1] == after[0] for before, after in itertools.pairwise(moved))


@given(skew=st.integers(0, 4095), nbytes=st.integers(1, 20_000), step=st.integers(1, 5000))
@STEADY
def test_what_ranges_of_an_extent_hold_of_a_buffer(skew: int, nbytes: int, step: int) -> None:
    bounds = range(0, skew + nbytes + step, step)
    ranges = [layout.payload(begin, begin + step, skew, nbytes) for begin in bounds]
    assert (ranges[0][0], ranges[-1][1]) == (0, nbytes)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 40), st.integers(0, 60))
@STEADY
def test_the_first_and_the_rest_of_a_vector(sizes: list[int], most: int, moved: int) -> None:
    pieces = [(1000 * index, size) for index, size in enumerate(sizes)]
    bytes_of = [address + byte for address, size in pieces for byte in range(size)]

    def flat(vector: list[tuple[int, int]]) -> list[int]:
        assert all(size > 0 for _, size in vector)
        return [address + byte for address, size in vector for byte in range(size)]

    assert flat(layout.first(pieces, most)) == bytes_of[:most]
    assert flat(layout.rest(pieces, moved)) == bytes_of[moved:]
