"""Layout against brute force: whatever the address and size, the parts of a transfer move every byte once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from io_backends import _layout
from io_backends._extents import align_up

STEADY = settings(derandomize=True, database=None, deadline=None, max_examples=300)
CHUNK = _layout.CHUNK_BYTES
BOUNCE = 1 << 50  # far from any buffer below


@given(
    block=st.sampled_from([1, 512, 4096]),
    skew=st.integers(0, 4095),
    nbytes=st.one_of(
        st.integers(1, 20_000), st.integers(1, 6 * CHUNK), st.integers(-9, 9).map(lambda d: 4 * CHUNK + d)
    ),
    most=st.integers(0, 9),
)
@STEADY
def test_parts_cover_an_extent_in_order_and_vectors_cover_memory_once(
    block: int, skew: int, nbytes: int, most: int
) -> None:
    skew %= block
    address = 7 * 4096 + skew
    length = align_up(skew + nbytes, block)
    parts = _layout.parts(length, block, most)
    assert [begin for begin, _ in parts] == [0, *[end for _, end in parts[:-1]]]
    assert parts[-1][1] == length
    assert 1 <= len(parts) <= max(1, most)
    assert len(parts) == 1 or min(end - begin for begin, end in parts) >= 2 * CHUNK - 2 * block
    moved: list[tuple[int, int]] = []  # ranges of memory, in file order
    for begin, end in parts:
        pieces, edges = _layout.vector(address, skew, nbytes, block, (begin, end), BOUNCE)
        assert sum(size for _, size in pieces) == end - begin
        for start, size in pieces:
            assert start % block == size % block == 0
        at = {inside // block: (outside, size) for inside, outside, size in edges}
        for start, size in pieces:
            if start >= BOUNCE:
                outside, inner = at.pop(start // block)
                moved.append((outside, outside + inner))
            else:
                moved.append((start, start + size))
        assert at == {}
    assert moved[0][0] == address
    assert moved[-1][1] == address + nbytes
    assert all(before[1] == after[0] for before, after in itertools.pairwise(moved))


@given(
    block=st.sampled_from([1, 512, 4096]),
    skew=st.integers(0, 4095),
    nbytes=st.one_of(st.integers(1, 20_000), st.integers(1, 6 * CHUNK)),
    most=st.integers(1, 5),
)
@STEADY
def test_chunks_are_the_same_however_a_transfer_is_cut(block: int, skew: int, nbytes: int, most: int) -> None:
    skew %= block
    length = align_up(skew + nbytes, block)
    count = _layout.chunks(length, block)
    ranges = [_layout.chunk_payload(index, skew, nbytes, block) for index in range(count)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == nbytes
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    assert all(first < last for first, last in ranges)
    indices = [index for part in _layout.parts(length, block, most) for index in _layout.chunks_of(part, length, block)]
    assert indices == list(range(count))
    for part in _layout.parts(length, block, most):
        mine = _layout.chunks_of(part, length, block)
        covered = (ranges[mine[0]][0], ranges[mine[-1]][1])
        assert covered == _layout.payload(*part, skew, nbytes)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (4 * CHUNK, [(0, 2 * CHUNK), (2 * CHUNK, 4 * CHUNK)]),
        (2 * CHUNK + 1024, [(0, 2 * CHUNK + 1024)]),  # 8 MiB at an odd address
        (4 * CHUNK - 512, [(0, 2 * CHUNK), (2 * CHUNK, 4 * CHUNK - 512)]),
        (3 * CHUNK, [(0, 3 * CHUNK)]),
        (512, [(0, 512)]),
    ],
)
def test_where_two_workers_cut(length: int, expected: list[tuple[int, int]]) -> None:
    assert _layout.parts(length, 512, 2) == expected


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 40), st.integers(0, 60))
@STEADY
def test_the_first_and_the_rest_of_a_vector(sizes: list[int], most: int, moved: int) -> None:
    pieces = [(1000 * index, size) for index, size in enumerate(sizes)]
    bytes_of = [address + byte for address, size in pieces for byte in range(size)]

    def flat(vector: list[tuple[int, int]]) -> list[int]:
        assert all(size > 0 for _, size in vector)
        return [address + byte for address, size in vector for byte in range(size)]

    assert flat(_layout.first(pieces, most)) == bytes_of[:most]
    assert flat(_layout.rest(pieces, moved)) == bytes_of[moved:]
