"""PosixStore: every byte comes back, from any address, in any size, and the file stays as small as what it holds."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from io_backends import Location, PosixStore, Syscalls, Ticket
from io_backends._file import space
from support.stores import (
    WAIT_S,
    Held,
    Pieces,
    buffer_of,
    cut,
    empty_at,
    pattern_at,
    read_back,
    write,
)

MIB = 1 << 20


def no_direct_open(path: str, flags: int, mode: int) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return os.open(path, flags, mode)


@pytest.fixture(params=["direct", "buffered", "paced"])
def store(request: pytest.FixtureRequest, scratch: Path) -> Iterator[PosixStore]:
    if request.param == "buffered":
        store = PosixStore(scratch, syscalls=Syscalls(open=no_direct_open))
        assert store.alignment == 1
    else:
        rate = 1e12 if request.param == "paced" else None
        store = PosixStore(scratch, write_rate_bytes_per_s=rate, read_rate_bytes_per_s=rate)
        if store.alignment == 1:
            store.close()
            pytest.skip(f"{scratch} has no direct I/O")
    yield store
    store.close()


def test_what_was_written_comes_back(store: PosixStore) -> None:
    block = store.alignment
    sizes = [1, 2, 511, 512, 513, 1023, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 3 * MIB + 77]
    for nbytes, skew in itertools.product(sizes, [0, 1, 64, 511, 512, 4032, 4095]):
        case = f"{nbytes} bytes at {skew}"
        array = pattern_at(skew, nbytes)
        expected = array.copy()
        ticket = write(store, array)
        assert isinstance(ticket.location, Location), case
        assert (ticket.location.skew, ticket.location.nbytes) == (array.ctypes.data % block, nbytes), case
        assert ticket.moved_bytes == -(-(ticket.location.skew + nbytes) // block) * block, case
        assert np.array_equal(array, expected), case
        array[:] = 0
        assert np.array_equal(read_back(store, ticket), expected), case
        assert np.array_equal(read_back(store, ticket, padded=False), expected), case
        if nbytes % 3:  # some stay, so that there are neighbours
            store.discard(ticket)


def test_every_combination_of_head_and_tail(scratch: Path) -> None:
    """Each head with three tails and each tail with three heads, stored together: neighbours would suffer."""
    store = PosixStore(scratch, threads=2)
    block = store.alignment
    noise = pattern_at(0, 4 * block, seed=1)
    few = [0, 1, block // 2 + 3, block - 1]
    ends = {(head, tail) for head in range(block) for tail in few} | {
        (head, tail) for head in few for tail in range(block)
    }
    ranges = [(head, 2 * block + tail) for head, tail in sorted(ends)]
    ranges += [(begin, begin + nbytes) for begin in range(0, block, 7) for nbytes in range(1, block + 8, 37)]
    tickets = [store.write(buffer_of(noise[begin:end])) for begin, end in ranges]
    reads = []
    for (begin, end), ticket in zip(ranges, tickets, strict=True):
        assert ticket.wait(WAIT_S)
        array = empty_at(begin % block, end - begin)
        reads.append((store.read(ticket.location, buffer_of(array, padded=True)), array))
    for (begin, end), (read, array) in zip(ranges, reads, strict=True):
        assert read.wait(WAIT_S)
        assert np.array_equal(array, noise[begin:end]), (begin, end)
    store.close()


def test_a_read_without_padding_touches_nothing_beside_its_range(store: PosixStore) -> None:
    array = pattern_at(100, 2 * MIB + 5)
    ticket = write(store, array)
    around = pattern_at(0, array.nbytes + 8192, seed=2)
    before = around.copy()
    for skew in (100, 4096 + 33):  # aligned as the write was, and not: never without the promise of `padded`
        target = around[skew : skew + array.nbytes]
        assert store.read(ticket.location, buffer_of(target)).wait(WAIT_S)
        assert np.array_equal(target, array)
        assert np.array_equal(around[:skew], before[:skew])
        assert np.array_equal(around[skew + array.nbytes :], before[skew + array.nbytes :])
        around[:] = before


def test_nothing_is_moved_for_no_bytes(store: PosixStore) -> None:
    for skew in (0, 100):
        ticket = write(store, empty_at(skew, 0))
        assert ticket.moved_bytes == 0
        assert read_back(store, ticket).nbytes == read_back(store, ticket, padded=False).nbytes == 0
        store.discard(ticket)
    assert store.used_bytes == 0


def test_the_bulk_goes_straight_from_its_memory_in_one_call(scratch: Path) -> None:
    seen: list[Pieces] = []
    real = Syscalls()

    def pwritev(fd: int, pieces: Pieces, offset: int) -> int:
        seen.append(list(pieces))
        return real.pwritev(fd, pieces, offset)

    store = PosixStore(scratch, syscalls=Syscalls(pwritev=pwritev))
    block = store.alignment
    seen.clear()
    array = pattern_at(64, 10 * block)
    write(store, array)
    (pieces,) = seen
    assert [length for _, length in pieces] == [block, 9 * block, block]
    assert pieces[1][0] == array.ctypes.data + block - 64
    store.close()


def test_pieces_under_a_rate_are_small_and_cover_everything(scratch: Path) -> None:
    seen: list[int] = []
    real = Syscalls()

    def preadv(fd: int, pieces: Pieces, offset: int) -> int:
        seen.append(sum(length for _, length in pieces))
        return real.preadv(fd, cut(pieces, 300 * 4096), offset)

    store = PosixStore(scratch, read_rate_bytes_per_s=20e6, syscalls=Syscalls(preadv=preadv))
    array = pattern_at(64, 5 * MIB + 9)
    ticket = write(store, array)
    seen.clear()
    assert np.array_equal(read_back(store, ticket), array)
    assert max(seen) <= 2e6  # of a tenth of a second
    assert sum(seen) >= array.nbytes
    with pytest.raises(ValueError, match="a rate must be positive, got 0"):
        PosixStore(scratch, write_rate_bytes_per_s=0)
    store.close()


# -- space ---------------------------------------------------------------------------------------------------------


def test_the_file_does_not_grow_over_a_thousand_rounds(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "GROWTH_BYTES", 4096)
    store = PosixStore(scratch)
    arrays = [pattern_at(64 * index, nbytes) for index, nbytes in enumerate((70_000, 5000, 33_333))]
    sizes = set()
    for _ in range(1000):
        tickets = [store.write(buffer_of(array)) for array in arrays]
        for ticket in tickets:
            assert ticket.wait(WAIT_S)
        sizes.add((os.fstat(store.open().fd).st_size, store.allocated_bytes()))
        for ticket in tickets:
            store.discard(ticket)
    assert len(sizes) == 1
    assert store.used_bytes == 0
    store.close()


def test_the_file_is_laid_out_ahead(scratch: Path) -> None:
    store = PosixStore(scratch)
    assert store.allocated_bytes() == 0
    write(store, pattern_at(0, 5000))
    assert os.fstat(store.open().fd).st_size == space.LEAST_GROWTH_BYTES
    assert store.allocated_bytes() >= 8192
    store.close()


def test_discarding_a_running_write_frees_its_space_only_when_it_has_ended(scratch: Path) -> None:
    held = Held()
    store = held.store(scratch, threads=2)
    first = store.write(buffer_of(pattern_at(0, 3 * 4096)))
    held.await_begun()
    store.discard(first)
    store.discard(first)
    assert store.used_bytes == 3 * 4096
    array = pattern_at(0, 2 * 4096, seed=2)
    second = store.write(buffer_of(array))
    held.await_begun()
    assert store.used_bytes == 5 * 4096
    held.release.set()
    assert first.wait(WAIT_S)
    assert second.wait(WAIT_S)
    assert second.location.offset == 3 * 4096  # not over what was still being written
    assert store.used_bytes == 2 * 4096
    store.discard(first)
    assert store.used_bytes == 2 * 4096
    assert write(store, pattern_at(0, 4096)).location.offset == 0
    assert np.array_equal(read_back(store, second), array)
    store.close()


def test_a_write_that_ends_between_two_looks_at_it_is_not_lost(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    store = held.store(scratch, threads=2)
    tickets = [store.write(buffer_of(pattern_at(0, 3 * 4096))) for _ in range(2)]
    held.await_begun(2)
    for ticket in tickets:
        store.discard(ticket)
    assert store.used_bytes == 6 * 4096
    held.release.set()
    store.close()
    looks = iter([False])
    with monkeypatch.context() as patch:
        patch.setattr(Ticket, "done", lambda ticket: ticket is tickets[0] or next(looks, True))
        assert store.used_bytes == 3 * 4096
    assert store.used_bytes == 0
