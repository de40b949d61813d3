"""What the stores' tests share: memory at a chosen address, patterns to move, system calls that fail, and forks."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from io_backends import Buffer, Location, PosixStore, Store, Syscalls, Ticket
from io_backends.testing import Fault, FaultyStore, Operation

Bytes = npt.NDArray[np.uint8]
Pieces = Sequence[tuple[int, int]]

_PAGE = 4096
WAIT_S = 60.0  # far above what any transfer here takes: a test that would hang fails instead


def once(holds: Callable[[], Any], then: Callable[[], Any]) -> threading.Thread:
    """Call `then`, on a thread of its own, as soon as something holds."""

    def wait() -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not holds() and time.monotonic() < deadline_s:
            time.sleep(0.001)
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def empty_at(skew: int, nbytes: int) -> Bytes:
    """`nbytes` zeros whose address modulo 4096 is `skew`, with whole pages of the array's own around them."""
    whole = np.zeros(nbytes + 3 * _PAGE, dtype=np.uint8)
    start = _PAGE + (skew - whole.ctypes.data) % _PAGE
    return whole[start : start + nbytes]


def pattern_at(skew: int, nbytes: int, seed: int = 0) -> Bytes:
    """The same filled with noise, so that bytes out of place show."""
    array = empty_at(skew, nbytes)
    array[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return array


def buffer_of(array: Bytes, *, padded: bool = False) -> Buffer:
    return Buffer(array.ctypes.data, array.nbytes, array, padded)


def write(store: Store, array: Bytes) -> Ticket:
    """A finished write. Raises its error."""
    ticket = store.write(buffer_of(array))
    assert ticket.wait(WAIT_S)
    return ticket


def read_back(store: Store, ticket: Ticket, *, padded: bool = True) -> Bytes:
    """What a finished write stored: read in place with `padded`, through a bounce buffer without."""
    location = ticket.location
    skew = location.skew if padded and isinstance(location, Location) else 77
    array = empty_at(skew, ticket.nbytes)
    assert store.read(location, buffer_of(array, padded=padded)).wait(WAIT_S)
    return array


def cut(pieces: Pieces, most_bytes: int) -> Pieces:
    """The first `most_bytes` of a vectored transfer, as a system that stops early moves them."""
    kept: list[tuple[int, int]] = []
    for address, length in pieces:
        if most_bytes > 0:
            kept.append((address, min(length, most_bytes)))
        most_bytes -= length
    return kept


class Failing:
    """A system call that raises the given errors first, one a call, and then does what the real one does."""

    def __init__(self, real: Callable[..., Any], *codes: int) -> None:
        self._real = real
        self.codes = list(codes)
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.codes:
            code = self.codes.pop(0)
            raise OSError(code, os.strerror(code))
        return self._real(*arguments)


class Calls:
    """System calls that move bytes, noted; all but the small ones that a store tries when it opens its file.

    Attributes:
        writes, reads: the offset in the file and the bytes of each.
        instead: may answer for the system, given the real call and its arguments.
    """

    def __init__(self) -> None:
        self.writes: list[tuple[int, int]] = []
        self.reads: list[tuple[int, int]] = []
        self.instead: Callable[..., int] | None = None
        self.syscalls = Syscalls(
            pwritev=self._noting(self.writes, Syscalls().pwritev), preadv=self._noting(self.reads, Syscalls().preadv)
        )

    def _noting(self, seen: list[tuple[int, int]], real: Callable[..., int]) -> Callable[[int, Pieces, int], int]:
        def call(fd: int, pieces: Pieces, offset: int) -> int:
            nbytes = sum(length for _, length in pieces)
            if nbytes <= _PAGE:
                return real(fd, pieces, offset)
            seen.append((offset, nbytes))
            return real(fd, pieces, offset) if self.instead is None else self.instead(real, fd, pieces, offset)

        return call


class Held:
    """System calls whose writes wait until `release` is set."""

    def __init__(self) -> None:
        self._begun = threading.Semaphore(0)
        self.release = threading.Event()
        real = Syscalls()

        def pwritev(fd: int, pieces: Pieces, offset: int) -> int:
            # The store tries two small writes when it opens its file.
            if sum(length for _, length in pieces) > _PAGE:
                self._begun.release()
                assert self.release.wait(WAIT_S)
            return real.pwritev(fd, pieces, offset)

        self.syscalls = Syscalls(pwritev=pwritev)

    def await_begun(self, count: int = 1) -> None:
        """Until `count` more writes wait."""
        assert all(self._begun.acquire(timeout=WAIT_S) for _ in range(count))

    def store(self, directory: os.PathLike[str], threads: int = 1) -> PosixStore:
        return PosixStore(directory, threads=threads, syscalls=self.syscalls)


class Copying(FaultyStore):
    """A store whose writes get a copy, which it may keep: as from a device, with which nobody else has the memory."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, lambda operation, number: None)

    def submit_write(self, buffer: Buffer, *callbacks: Any) -> Ticket:
        copy = np.empty(buffer.nbytes, np.uint8)
        ctypes.memmove(copy.ctypes.data, buffer.address, buffer.nbytes)
        return super().submit_write(Buffer(copy.ctypes.data, copy.nbytes, copy, given=True), *callbacks)


class Plan:
    """A plan for `FaultyStore` that is given as a dict and remembers what it was asked."""

    def __init__(self, faults: dict[tuple[Operation, int], Fault]) -> None:
        self._faults = faults
        self.asked: list[tuple[Operation, int]] = []

    def __call__(self, operation: Operation, number: int) -> Fault | None:
        self.asked.append((operation, number))
        return self._faults.get((operation, number))


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _fork() -> int:
    """Fork. Where filelock has been imported, it refuses that while another thread forks."""
    while True:
        try:
            return os.fork()
        except RuntimeError as error:
            if "filelock" not in str(error):
                raise


def in_child(action: Callable[[], str]) -> str:
    """What `action` returns in a forked child, which must end on its own within a minute."""
    receive, send = os.pipe()
    pid = _fork()
    if pid == 0:
        try:
            signal.alarm(int(WAIT_S))  # a deadlock ends here
            try:
                answer = action()
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(send, answer.encode())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        answer = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0, "the child was killed"
    return answer
