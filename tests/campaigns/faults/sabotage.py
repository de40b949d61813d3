"""Sabotage: the faults of a case, put in at the two seams beneath the engine.

Guarantees:

1. A fault strikes the calls it was drawn for, counted over all threads, and no others; `struck` tells how often.
2. After `stop` no call is struck any more, and those held up go on: whatever a case leaves behind after that, tba has
   left.

Faults that hold a transfer up do so on the store's own threads; a thread of this module's (named otherwise) lets go.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from io_backends import StoreFull, Syscalls
from io_backends.testing import Fault, Operation
from support.stores import Pieces, cut

from .cases import BRIEF, Case

_BLOCK = 4096
_LATE_S = 0.01  # at most, each time
_HELD_S = (0.3, 0.8)  # above the timeout of these cases, and soon over
_REAL = Syscalls()


class WorkerKiller(Exception):
    """Ends the loop of the worker it is raised on, which breaks the store.

    A worker hands the exception of a transfer to the thread that waits, and makes a message of it. Making one of this
    exception raises SystemExit, which no code there expects.
    """

    def __str__(self) -> str:
        raise SystemExit("the worker's loop ends here")


class Sabotage:
    """The faults of `case`, over a run of about `transfers` transfers each way.

    Attributes:
        syscalls: for the `PosixStore`s beneath.
        struck: calls that a fault struck.
    """

    def __init__(self, case: Case, transfers: int) -> None:
        self.struck = 0
        self._case = case
        # A file is opened once or twice and laid out as often: mostly the first time is struck.
        self._first = int(case.where * (transfers if case.call in ("write", "read") else 1.4))
        self._calls = 0
        self._over = False
        self._lock = threading.Lock()
        self._free = threading.Event()  # set: nothing is held up (any more)
        self._timer: threading.Timer | None = None
        self.syscalls = Syscalls(open=self._open, pwritev=self._pwritev, preadv=self._preadv, fallocate=self._fallocate)

    def stop(self) -> None:
        """End all faults."""
        with self._lock:
            self._over = True
            timer = self._timer
        self._free.set()
        if timer is not None:
            timer.cancel()
            timer.join()

    def count(self) -> None:
        """Count a fault that struck outside of these calls."""
        with self._lock:
            self.struck += 1

    def _strikes(self, call: str, *kinds: str) -> bool:
        """Count a call of a seam; return whether it is struck."""
        case = self._case
        if case.kind not in kinds or case.call != call:
            return False
        with self._lock:
            number = self._calls
            self._calls += 1
            if self._over or not self._first <= number < self._first + case.count:
                return False
            self.struck += 1
            if case.kind in BRIEF and self._timer is None:
                shortest_s, longest_s = _HELD_S
                held_s = shortest_s + (longest_s - shortest_s) * case.amount
                self._timer = threading.Timer(held_s, self._let_go)
                self._timer.name = "sabotage"
                self._timer.start()
            return True

    def _let_go(self) -> None:
        with self._lock:
            self._over = True
        self._free.set()

    # -- the protocol --------------------------------------------------------------------------------------------

    def plan(self, operation: Operation, number: int) -> Fault | None:
        """The fault of a transfer, for `FaultyStore`."""
        case = self._case
        if not self._strikes(operation, "late", "failing", "store full", "stalled"):
            return None
        if case.kind == "late":
            return Fault(delay_s=_LATE_S * case.amount)
        if case.kind == "stalled":
            return Fault(gate=self._free)
        if case.kind == "store full":
            return Fault(error=StoreFull("a store without room, for a test"))
        return Fault(error=OSError(case.code, os.strerror(case.code)))

    # -- the system calls ----------------------------------------------------------------------------------------

    def _open(self, path: str, flags: int, mode: int) -> int:
        if not self._case.direct and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        if self._strikes("open", "open"):
            raise self._error()
        return _REAL.open(path, flags, mode)

    def _fallocate(self, fd: int, offset: int, length: int) -> None:
        if self._strikes("fallocate", "fallocate"):
            raise self._error()
        if self._strikes("fallocate", "interrupted"):
            raise InterruptedError(errno.EINTR, "interrupted")
        _REAL.fallocate(fd, offset, length)

    def _pwritev(self, fd: int, pieces: Pieces, offset: int) -> int:
        return self._transfer("write", _REAL.pwritev, fd, pieces, offset)

    def _preadv(self, fd: int, pieces: Pieces, offset: int) -> int:
        return self._transfer("read", _REAL.preadv, fd, pieces, offset)

    def _transfer(self, call: str, real: Callable[[int, Pieces, int], int], fd: int, pieces: Pieces, at: int) -> int:
        case = self._case
        kinds: tuple[str, ...] = (
            "error",
            "cut short",
            "torn",
            "interrupted",
            "flipped",
            "lost",
            "misplaced",
            "slow device",
            "hanging device",
        )
        # The thread that asks first opens and tries a file: that is no worker.
        if threading.current_thread().name.startswith("tba-"):
            kinds = (*kinds, "dying worker")
        if not self._strikes(call, *kinds):
            return real(fd, pieces, at)
        asked = sum(length for _, length in pieces)
        match case.kind:
            case "error":
                raise self._error()
            case "interrupted":
                raise InterruptedError(errno.EINTR, "interrupted")
            case "dying worker":
                raise WorkerKiller
            case "cut short":
                return real(fd, cut(pieces, int(case.amount * asked) // _BLOCK * _BLOCK or _BLOCK), at)
            case "torn":  # inside a block, from where direct I/O cannot go on; a buffered file could
                return real(fd, pieces, at) - 1 if case.direct and case.amount < 0.5 else 0
            case "lost":
                return asked
            case "misplaced":
                return real(fd, pieces, at - _BLOCK if at >= _BLOCK else at + _BLOCK)
            case "slow device":
                time.sleep(_LATE_S * case.amount)
            case "hanging device":
                self._free.wait()
        moved = real(fd, pieces, at)
        if case.kind == "flipped" and moved > 0:
            place = _place(pieces, moved, case.amount)
            if case.on_disk:
                _flip_in_file(fd, at + place)
            else:
                _flip_in_memory(pieces, place)
        return moved

    def _error(self) -> OSError:
        return OSError(self._case.code, os.strerror(self._case.code))


def _place(pieces: Pieces, moved: int, amount: float) -> int:
    """A place in the largest piece that moved: the small ones around it have padding, where a flip does no harm."""
    begin, best = 0, (0, 0)
    for _, length in pieces:
        best = max(best, (min(length, moved - begin), -begin))
        begin += length
    return int(amount * best[0]) - best[1]


def _flip_in_memory(pieces: Pieces, place: int) -> None:
    for address, length in pieces:
        if place < length:
            byte = ctypes.c_ubyte.from_address(address + place)
            byte.value ^= 1 << place % 8
            return
        place -= length


def _flip_in_file(fd: int, place: int) -> None:
    """Flip one bit of the block that holds `place`, with the calls and flags that wrote it."""
    page = mmap.mmap(-1, _BLOCK)
    anchor: Any = ctypes.c_char.from_buffer(page)
    address = ctypes.addressof(anchor)
    begin = place // _BLOCK * _BLOCK
    found = _REAL.preadv(fd, [(address, _BLOCK)], begin)
    if place - begin < found:
        page[place - begin] ^= 1 << place % 8
        _REAL.pwritev(fd, [(address, found)], begin)
    del anchor
    page.close()
