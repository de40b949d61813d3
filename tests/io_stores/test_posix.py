"""PosixStore: every byte comes back, big transfers in few calls, and space is free once nobody uses it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from io_backends import PosixStore, StoreBroken, Syscalls, Ticket, TicketState
from io_backends._stores import file_store
from support.stores import (
    WAIT_S,
    Calls,
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
NBYTES = 25 * MIB + 77
SOURCE = pattern_at(0, NBYTES + 4096)


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def store(scratch: Path, calls: Calls) -> Iterator[PosixStore]:
    store = PosixStore(scratch, threads=3, syscalls=calls.syscalls)
    yield store
    store.close()


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


# -- big transfers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew", [0, 64, 511, 4000])
def test_one_tensor_is_one_call(store: PosixStore, calls: Calls, skew: int) -> None:
    array = SOURCE[skew : skew + NBYTES]
    ticket = write(store, array)
    assert np.array_equal(read_back(store, ticket), array)
    assert len(calls.writes + calls.reads) == 2
    assert np.array_equal(read_back(store, ticket, padded=False), array)  # all of it through bounce buffers


def test_system_calls_are_bounded_so_that_a_very_big_tensor_is_seen_to_move(
    store: PosixStore, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "_CALL_BYTES", MIB)
    array = SOURCE[100 : 100 + NBYTES]
    assert np.array_equal(read_back(store, write(store, array)), array)
    assert max(nbytes for _, nbytes in calls.writes + calls.reads) == MIB


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, os.strerror(errno.EIO)), SystemExit("injected"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("kind", ["write", "read"])
def test_an_error_half_way_is_the_transfer_s_alone(
    store: PosixStore, calls: Calls, monkeypatch: pytest.MonkeyPatch, error: BaseException, kind: str
) -> None:
    """Also one that ends a program elsewhere."""
    good = write(store, SOURCE)
    monkeypatch.setattr(file_store, "_CALL_BYTES", MIB)
    calls.writes.clear()
    calls.reads.clear()

    def instead(real: Callable[..., int], *arguments: object) -> int:
        if len(calls.writes + calls.reads) == 3:
            raise error
        return real(*arguments)

    calls.instead = instead
    buffer = buffer_of(SOURCE.copy(), padded=True)
    ticket = store.write(buffer) if kind == "write" else store.read(good.location, buffer)
    with pytest.raises(StoreBroken, match=r"Input/output error|injected|KeyboardInterrupt"):
        ticket.wait(WAIT_S)
    assert (ticket.moved_bytes, ticket.state) == (0, TicketState.FAILED)
    calls.instead = None
    if kind == "write":
        store.discard(ticket)
    assert np.array_equal(read_back(store, good), SOURCE)
    store.discard(good)
    assert store.used_bytes == 0
