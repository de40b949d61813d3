"""PosixStore's big transfers: every byte, every error, nothing kept, and calls of a bounded size."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from io_backends import PosixStore, StoreBroken, StoreClosed, Syscalls, TicketState
from io_backends._stores import file_store
from support.stores import WAIT_S, Held, Pieces, buffer_of, cut, in_child, pattern_at, read_back, write

MIB = 1 << 20
NBYTES = 25 * MIB + 77
REAL = Syscalls()
SOURCE = pattern_at(0, NBYTES + 4096)


class Recorder:
    """The sizes of system calls, and whatever else a test wants to happen in them."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.instead: Callable[..., int] | None = None

    def of(self, real: Callable[[int, Pieces, int], int]) -> Callable[[int, Pieces, int], int]:
        def call(fd: int, pieces: Pieces, offset: int) -> int:
            nbytes = sum(length for _, length in pieces)
            if nbytes <= 4096:  # the store tries small ones when it opens its file
                return real(fd, pieces, offset)
            self.sizes.append(nbytes)
            return real(fd, pieces, offset) if self.instead is None else self.instead(real, fd, pieces, offset)

        return call


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def store(scratch: Path, recorder: Recorder) -> Iterator[PosixStore]:
    syscalls = Syscalls(pwritev=recorder.of(REAL.pwritev), preadv=recorder.of(REAL.preadv))
    store = PosixStore(scratch, threads=3, syscalls=syscalls)
    yield store
    store.close()


@pytest.mark.parametrize("skew", [0, 64, 511, 4000])
def test_one_tensor_is_one_call(store: PosixStore, recorder: Recorder, skew: int) -> None:
    array = SOURCE[skew : skew + NBYTES]
    ticket = write(store, array)
    assert np.array_equal(read_back(store, ticket), array)
    assert len(recorder.sizes) == 2
    assert np.array_equal(read_back(store, ticket, padded=False), array)  # all of it through bounce buffers


def test_system_calls_are_bounded_so_that_a_very_big_tensor_is_seen_to_move(
    store: PosixStore, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "_CALL_BYTES", MIB)
    array = SOURCE[100 : 100 + NBYTES]
    assert np.array_equal(read_back(store, write(store, array)), array)
    assert max(recorder.sizes) == MIB


@pytest.mark.parametrize("padded", [True, False])
def test_what_is_moved_bit_by_bit(store: PosixStore, recorder: Recorder, padded: bool) -> None:
    recorder.instead = lambda real, fd, pieces, offset: real(fd, cut(pieces, 300 * 4096), offset)
    array = SOURCE[4000 : 4000 + NBYTES]
    assert np.array_equal(read_back(store, write(store, array), padded=padded), array)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, os.strerror(errno.EIO)), SystemExit("injected"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("kind", ["write", "read"])
def test_an_error_half_way_is_the_transfer_s_alone(
    store: PosixStore, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, error: BaseException, kind: str
) -> None:
    """Also one that ends a program elsewhere."""
    good = write(store, SOURCE)
    monkeypatch.setattr(file_store, "_CALL_BYTES", MIB)
    recorder.sizes.clear()

    def instead(real: Callable[..., int], *arguments: object) -> int:
        if len(recorder.sizes) == 3:
            raise error
        return real(*arguments)

    recorder.instead = instead
    buffer = buffer_of(SOURCE.copy(), padded=True)
    ticket = store.write(buffer) if kind == "write" else store.read(good.location, buffer)
    with pytest.raises(StoreBroken, match=r"Input/output error|injected|KeyboardInterrupt"):
        ticket.wait(WAIT_S)
    assert (ticket.moved_bytes, ticket.state) == (0, TicketState.FAILED)
    recorder.instead = None
    if kind == "write":
        store.discard(ticket)
    assert np.array_equal(read_back(store, good), SOURCE)
    store.discard(good)
    assert store.used_bytes == 0


def test_a_discard_or_close_in_the_middle_lets_it_end(scratch: Path) -> None:
    held = Held()
    store = held.store(scratch, threads=1)
    ticket = store.write(buffer_of(SOURCE))
    held.await_begun(1)
    assert not ticket.cancel()
    store.discard(ticket)
    assert store.used_bytes >= SOURCE.nbytes
    queued = store.write(buffer_of(SOURCE))
    store.abandon()
    held.release.set()
    store.close()
    assert ticket.state is TicketState.DONE
    assert store.used_bytes == 0
    with pytest.raises(StoreClosed):
        queued.wait(0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forks_wait_for_it(store: PosixStore, recorder: Recorder) -> None:
    running: set[str] = set()
    begun = threading.Semaphore(0)

    def note(real: Callable[..., int], fd: int, pieces: Pieces, offset: int) -> int:
        running.add(threading.current_thread().name)
        begun.release()
        moved = real(fd, pieces, offset)
        running.discard(threading.current_thread().name)
        return moved

    recorder.instead = note
    for _ in range(3):
        ticket = store.write(buffer_of(SOURCE))
        assert begun.acquire(timeout=WAIT_S)
        assert in_child(lambda: f"{len(running)} in flight") == "0 in flight"
        assert ticket.wait(WAIT_S)
        assert np.array_equal(read_back(store, ticket), SOURCE)
