"""PosixStore under a system that cuts, fails or interrupts transfers, or is full: every byte or an error."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from io_backends import Buffer, PosixStore, ShortTransfer, StoreBroken, StoreFull, Syscalls
from io_backends._file import space
from support.stores import WAIT_S, Failing, Pieces, buffer_of, cut, pattern_at, read_back, write

NBYTES = 100_000
REAL = Syscalls()


class Later:
    """A system call that can be replaced once the store's file is open (opening it tries two small transfers)."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.call = real

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)


@pytest.fixture
def writing() -> Later:
    return Later(REAL.pwritev)


@pytest.fixture
def reading() -> Later:
    return Later(REAL.preadv)


@pytest.fixture
def layout() -> Later:
    return Later(REAL.fallocate)


@pytest.fixture(params=[False, True], ids=["direct", "buffered"])
def store(request: pytest.FixtureRequest, scratch: Path, writing: Later, reading: Later, layout: Later) -> Any:
    def buffered(path: str, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return REAL.open(path, flags, mode)

    syscalls = Syscalls(
        open=buffered if request.param else REAL.open, pwritev=writing, preadv=reading, fallocate=layout
    )
    store = PosixStore(scratch, threads=1, syscalls=syscalls)
    store.open()
    yield store
    store.close()


def cutting(real: Callable[..., int], most_bytes: int) -> Callable[[int, Pieces, int], int]:
    return lambda fd, pieces, offset: real(fd, cut(pieces, most_bytes), offset)


@pytest.mark.parametrize("most_bytes", [1, 1000, 5001])
def test_a_transfer_that_is_cut_inside_a_block(
    store: PosixStore, writing: Later, reading: Later, most_bytes: int
) -> None:
    array = pattern_at(4000, 6000)
    if store.alignment == 1:
        writing.call, reading.call = cutting(REAL.pwritev, most_bytes), cutting(REAL.preadv, most_bytes)
        assert np.array_equal(read_back(store, write(store, array)), array)
    else:  # direct I/O cannot go on from there
        writing.call = lambda *arguments: min(REAL.pwritev(*arguments), most_bytes)
        with pytest.raises(ShortTransfer, match=f"{most_bytes} of .* bytes moved in '{store.directory}'"):
            write(store, array)


@pytest.mark.parametrize("moved", [0, 100])
def test_short_without_an_error_is_an_error(store: PosixStore, reading: Later, writing: Later, moved: int) -> None:
    array = pattern_at(4000, NBYTES)
    ticket = write(store, array)
    reading.call = writing.call = lambda fd, pieces, offset: 0 if store.alignment == 1 else moved
    with pytest.raises(ShortTransfer):
        read_back(store, ticket)
    with pytest.raises(ShortTransfer):
        read_back(store, ticket, padded=False)
    with pytest.raises(ShortTransfer):
        write(store, array)
    reading.call = REAL.preadv
    assert np.array_equal(read_back(store, ticket), array)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV, errno.EFAULT, errno.EBADF])
def test_a_failing_device_breaks_the_transfer_and_not_the_store(
    store: PosixStore, writing: Later, reading: Later, code: int
) -> None:
    array = pattern_at(64, NBYTES)
    writing.call = Failing(REAL.pwritev, code)
    with pytest.raises(StoreBroken, match=f"transfer of {NBYTES} bytes in '{store.directory}'") as caught:
        write(store, array)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == code
    ticket = write(store, array)
    reading.call = Failing(REAL.preadv, code)
    with pytest.raises(StoreBroken):
        read_back(store, ticket)
    assert np.array_equal(read_back(store, ticket), array)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_so_and_works_again_once_it_has_room(store: PosixStore, writing: Later, code: int) -> None:
    array = pattern_at(64, NBYTES)
    writing.call = Failing(REAL.pwritev, code)
    failed = store.write(buffer_of(array))
    with pytest.raises(StoreFull, match=f"no space left in '{store.directory}'"):
        failed.wait(WAIT_S)
    assert failed.moved_bytes == 0
    store.discard(failed)
    assert store.used_bytes == 0
    assert np.array_equal(read_back(store, write(store, array)), array)


def test_an_interrupted_call_is_made_again(store: PosixStore, writing: Later, reading: Later, layout: Later) -> None:
    """A signal for the program may reach a worker; some file systems then answer EINTR."""
    failing = [Failing(call, errno.EINTR, errno.EINTR) for call in (REAL.pwritev, REAL.preadv, REAL.fallocate)]
    writing.call, reading.call, layout.call = failing
    array = pattern_at(64, NBYTES)
    assert np.array_equal(read_back(store, write(store, array)), array)
    assert [call.calls for call in failing] == [3, 3, 3]


# -- laying out the file -------------------------------------------------------------------------------------------


def test_a_disk_with_room_for_this_write_but_no_more(store: PosixStore, layout: Later) -> None:
    asked: list[tuple[int, int]] = []

    def fallocate(fd: int, offset: int, length: int) -> None:
        asked.append((offset, length))
        if length >= space.LEAST_GROWTH_BYTES:
            raise OSError(errno.ENOSPC, "no space")
        REAL.fallocate(fd, offset, length)

    layout.call = fallocate
    arrays = [pattern_at(0, NBYTES, seed) for seed in range(2)]
    tickets = [write(store, array) for array in arrays]
    for ticket, array in zip(tickets, arrays, strict=True):
        assert np.array_equal(read_back(store, ticket), array)
    extent = 25 * 4096  # of NBYTES
    growth = space.LEAST_GROWTH_BYTES
    assert asked == [(0, growth), (0, extent), (extent, growth - extent)]


def test_a_disk_that_has_no_room_for_the_write(store: PosixStore, layout: Later) -> None:
    array = pattern_at(64, NBYTES)
    layout.call = Failing(REAL.fallocate, errno.ENOSPC, errno.EDQUOT)
    with pytest.raises(StoreFull, match=f"no space left in '{store.directory}'"):
        write(store, array)
    assert np.array_equal(read_back(store, write(store, array)), array)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_lay_out_is_not_asked_again(store: PosixStore, layout: Later, code: int) -> None:
    failing = layout.call = Failing(REAL.fallocate, code, code, code)
    array = pattern_at(64, NBYTES)
    for _ in range(3):
        assert np.array_equal(read_back(store, write(store, array)), array)
    assert failing.calls == 1


def test_another_error_while_laying_out_breaks_the_write(store: PosixStore, layout: Later) -> None:
    layout.call = Failing(REAL.fallocate, errno.EIO)
    with pytest.raises(StoreBroken, match="cannot lay out a file"):
        write(store, pattern_at(64, NBYTES))


# -- memory --------------------------------------------------------------------------------------------------------


def test_a_buffer_that_others_change_meanwhile_is_not_compared(scratch: Path) -> None:
    """As bytes between the columns of a tensor, which belong to another one."""
    memory = bytearray(bytes(range(256)) * 64)
    whole = Buffer.of(memory)
    store = PosixStore(scratch)
    for shared in (True, False):
        ticket = store.write(whole._replace(shared=shared))
        assert ticket.wait(WAIT_S)
        assert (ticket.location.checksum is None) is shared
        back = bytearray(len(memory))
        assert store.read(ticket.location, back).wait(WAIT_S)
        assert back == memory
    store.close()
