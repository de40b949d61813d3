"""PosixStore's big transfers, cut among its workers: every byte, every error, and nothing kept, as with small ones."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from io_backends import PosixStore, ShortTransfer, StoreBroken, StoreClosed, Syscalls, Ticket, TicketState, _posix
from support.stores import WAIT_S, Held, Pieces, buffer_of, cut, empty_at, in_child, pattern_at, read_back, write

MIB = 1 << 20
NBYTES = 25 * MIB + 77
REAL = Syscalls()
SOURCE = pattern_at(0, NBYTES + 4096)


class Recorder:
    """System calls with the thread, place and size of each, and whatever else a test wants to happen in them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []  # thread, offset, nbytes
        self.meet: threading.Barrier | None = None
        self.instead: Callable[..., int] | None = None

    def of(self, real: Callable[[int, Pieces, int], int]) -> Callable[[int, Pieces, int], int]:
        def call(fd: int, pieces: Pieces, offset: int) -> int:
            nbytes = sum(length for _, length in pieces)
            if nbytes <= 4096:  # the store tries small ones when it opens its file
                return real(fd, pieces, offset)
            self.seen.append((threading.current_thread().name, offset, nbytes))
            if self.meet is not None:
                self.meet.wait(WAIT_S)
            if self.instead is not None:
                return self.instead(real, fd, pieces, offset)
            return real(fd, pieces, offset)

        return call


def rest(store: PosixStore) -> None:
    """Until all workers are idle, also those that have just ended a part."""
    with store._workers.held():
        pass


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def store(scratch: Path, recorder: Recorder) -> Iterator[PosixStore]:
    syscalls = Syscalls(pwritev=recorder.of(REAL.pwritev), preadv=recorder.of(REAL.preadv))
    store = PosixStore(scratch, threads=3, syscalls=syscalls)
    write(store, pattern_at(0, 1))  # the workers are there, and idle
    rest(store)
    recorder.seen.clear()
    yield store
    store.close()


@pytest.mark.parametrize("skew", [0, 64, 511, 4000])
def test_one_tensor_uses_all_workers(store: PosixStore, recorder: Recorder, skew: int) -> None:
    array = SOURCE[skew : skew + NBYTES]
    recorder.meet = threading.Barrier(3)  # three calls at once, or the test fails
    ticket = write(store, array)
    length = -(-(ticket.location.skew + NBYTES) // store.alignment) * store.alignment
    for kind in ("write", "padded read", "plain read"):
        if kind != "write":
            rest(store)
            recorder.seen.clear()
            copy = read_back(store, ticket, padded=True) if kind == "padded read" else empty_at(skew, NBYTES)
            if kind == "plain read":
                assert store.read(ticket.location, buffer_of(copy)).wait(WAIT_S)
            assert np.array_equal(copy, array)
        threads, begins, sizes = zip(*sorted(recorder.seen, key=lambda call: call[1]), strict=True)
        assert len(set(threads)) == 3, kind
        ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
        assert [*begins[1:], ticket.location.offset + length] == ends, kind
        assert begins[0] == ticket.location.offset, kind
    recorder.meet = None
    assert np.array_equal(read_back(store, ticket, padded=False), array)  # all of it through bounce buffers


def test_small_ones_and_those_of_busy_workers_go_whole(scratch: Path, recorder: Recorder) -> None:
    held = Held()
    store = PosixStore(scratch, threads=2, syscalls=Syscalls(pwritev=recorder.of(held.syscalls.pwritev)))
    first = store.write(buffer_of(SOURCE[: 15 * MIB]))
    held.await_begun()
    second = store.write(buffer_of(SOURCE[: 25 * MIB]))  # big, but the other worker has something to do
    held.await_begun()
    held.release.set()
    assert first.wait(WAIT_S)
    assert second.wait(WAIT_S)
    assert sorted(nbytes for _, _, nbytes in recorder.seen) == [15 * MIB, 25 * MIB]
    store.close()


def test_system_calls_are_bounded_so_that_a_very_big_tensor_is_seen_to_move(
    store: PosixStore, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_posix, "_CALL_BYTES", MIB)
    array = SOURCE[100 : 100 + NBYTES]
    ticket = write(store, array)
    assert np.array_equal(read_back(store, ticket), array)
    assert max(nbytes for _, _, nbytes in recorder.seen) == MIB


@pytest.mark.parametrize("padded", [True, False])
def test_parts_that_are_moved_bit_by_bit(store: PosixStore, recorder: Recorder, padded: bool) -> None:
    recorder.instead = lambda real, fd, pieces, offset: real(fd, cut(pieces, 300 * 4096), offset)
    array = SOURCE[4000 : 4000 + NBYTES]
    assert np.array_equal(read_back(store, write(store, array), padded=padded), array)


def failing_at(place: int, error: Callable[[], BaseException]) -> Callable[..., int]:
    """Of three calls that begin together the one at `place`, in file order, fails; the others go well, later."""
    together = threading.Barrier(3)
    lock, offsets = threading.Lock(), list[int]()

    def instead(real: Callable[..., int], fd: int, pieces: Pieces, offset: int) -> int:
        with lock:
            offsets.append(offset)
        together.wait(WAIT_S)
        if sorted(offsets)[place] == offset:
            raise error()
        return real(fd, pieces, offset)

    return instead


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", ["write", "read"])
def test_an_error_in_any_part_is_the_transfer_s(store: PosixStore, recorder: Recorder, place: int, kind: str) -> None:
    good = write(store, SOURCE)
    rest(store)
    recorder.instead = failing_at(place, lambda: OSError(errno.EIO, os.strerror(errno.EIO)))
    array = empty_at(0, SOURCE.nbytes)
    watched = weakref.ref(array)
    gc.collect()
    gc.disable()
    try:
        buffer = buffer_of(array, padded=True)
        ticket = store.write(buffer) if kind == "write" else store.read(good.location, buffer)
        del array, buffer
        with pytest.raises(StoreBroken, match=f"transfer of {SOURCE.nbytes} bytes .*Input/output error"):
            ticket.wait(WAIT_S)
        assert watched() is None
    finally:
        gc.enable()
    assert ticket.moved_bytes == 0
    assert ticket.state is TicketState.FAILED
    recorder.instead = None
    if kind == "write":
        store.discard(ticket)
    assert np.array_equal(read_back(store, good), SOURCE)
    store.discard(good)
    assert store.used_bytes == 4096  # the fixture's


def test_a_short_part_is_the_transfer_s_error(store: PosixStore, recorder: Recorder) -> None:
    if store.alignment == 1:
        pytest.skip("buffered I/O goes on after any number of bytes")
    calls = iter(range(1000))
    recorder.instead = lambda real, *arguments: 100 if next(calls) == 1 else real(*arguments)
    with pytest.raises(ShortTransfer, match=r"100 of .* bytes moved"):
        write(store, SOURCE)


@pytest.mark.parametrize("error", [SystemExit("injected"), KeyboardInterrupt()])
def test_what_ends_a_program_ends_one_transfer_here(
    store: PosixStore, recorder: Recorder, error: BaseException
) -> None:
    def fail() -> BaseException:
        return error

    recorder.instead = failing_at(1, fail)
    with pytest.raises(StoreBroken, match=type(error).__name__):
        write(store, SOURCE)
    recorder.instead = None
    assert np.array_equal(read_back(store, write(store, SOURCE)), SOURCE)


def test_discarding_a_transfer_in_parts_frees_its_space_when_the_last_has_ended(scratch: Path) -> None:
    held = Held()
    store = PosixStore(scratch, threads=3, syscalls=held.syscalls)
    ticket = store.write(buffer_of(SOURCE))
    held.await_begun(1)
    assert not ticket.cancel()
    store.discard(ticket)
    other = store.write(buffer_of(pattern_at(0, 5000)))
    held.release.set()
    assert other.wait(WAIT_S)
    assert ticket.wait(WAIT_S)
    assert store.used_bytes == 8192
    store.close()


def test_closing_in_the_middle_lets_every_part_end(store: PosixStore, recorder: Recorder) -> None:
    begun, release = threading.Semaphore(0), threading.Event()

    def wait(real: Callable[..., int], *arguments: Any) -> int:
        begun.release()
        assert release.wait(WAIT_S)
        return real(*arguments)

    recorder.instead = wait
    ticket = store.write(buffer_of(SOURCE))
    assert all(begun.acquire(timeout=WAIT_S) for _ in range(3))
    queued = store.write(buffer_of(SOURCE))
    store.abandon()
    release.set()
    store.close()
    assert ticket.state is TicketState.DONE
    with pytest.raises(StoreClosed):
        queued.wait(0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forks_wait_for_all_parts(store: PosixStore, recorder: Recorder) -> None:
    running: set[tuple[str, int]] = set()
    begun = threading.Semaphore(0)

    def note(real: Callable[..., int], fd: int, pieces: Pieces, offset: int) -> int:
        running.add((threading.current_thread().name, offset))
        begun.release()
        moved = real(fd, pieces, offset)
        running.discard((threading.current_thread().name, offset))
        return moved

    recorder.instead = note
    tickets: list[Ticket] = []
    for _ in range(6):
        tickets.append(store.write(buffer_of(SOURCE)))
        assert begun.acquire(timeout=WAIT_S)
        assert in_child(lambda: f"{len(running)} in flight") == "0 in flight"
    for ticket in tickets:
        assert ticket.wait(WAIT_S)
        assert np.array_equal(read_back(store, ticket), SOURCE)
