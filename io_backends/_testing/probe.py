"""Probe: memory to move, and gates that hold transfers, for tests of stores (`_testing.promises`)."""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
from collections.abc import Callable
from typing import Any

from .._buffer import Buffer
from .._errors import StoreError
from .._store import Store
from .._ticket import Ticket

PAGE = 4096
WAIT_S = 60.0  # far more than anything here takes: a hang becomes a failure


class Memory:
    """`nbytes` of noise at an address that is `skew` modulo 4096, within whole pages of its own."""

    def __init__(self, nbytes: int, skew: int = 0, seed: int | None = 0) -> None:
        self.nbytes = nbytes
        self._start = PAGE + skew
        self._pages = mmap.mmap(-1, (self._start + nbytes) // PAGE * PAGE + 2 * PAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages)) + self._start
        if seed is not None:
            self._pages[self._start : self._start + nbytes] = random.Random(seed).randbytes(nbytes)

    def buffer(self, *, padded: bool = False) -> Buffer:
        return Buffer(self._address, self.nbytes, self, padded)

    def content(self) -> bytes:
        return self._pages[self._start : self._start + self.nbytes]

    def around(self) -> bytes:
        return self._pages[: self._start] + self._pages[self._start + self.nbytes :]

    def clear(self) -> None:
        self._pages[:] = bytes(len(self._pages))


class Gate:
    """A `before` that waits until the `with` statement is left; `begun` counts its calls."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self) -> None:
        self.begun.release()
        assert self.open.wait(WAIT_S), "a gate was never opened"

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()  # also if a check fails, so that the store can close


def written_to(store: Store, memory: Memory) -> Ticket:
    ticket = store.write(memory.buffer())
    assert ticket.wait(WAIT_S), f"a write of {memory.nbytes} bytes did not end within {WAIT_S:g} s"
    return ticket


def read_back(store: Store, ticket: Ticket, skew: int = 0) -> bytes:
    memory = Memory(ticket.nbytes, skew, None)
    read = store.read(ticket.location, memory.buffer())
    assert read.wait(WAIT_S), f"a read of {ticket.nbytes} bytes did not end within {WAIT_S:g} s"
    return memory.content()


def submit(store: Store, location: Any, buffer: Buffer, *, reading: bool, **callbacks: Any) -> Ticket:
    return store.read(location, buffer, **callbacks) if reading else store.write(buffer, **callbacks)


def error_of(ticket: Ticket) -> StoreError | None:
    try:
        assert ticket.wait(WAIT_S), f"a transfer did not end within {WAIT_S:g} s"
    except StoreError as error:
        return error
    return None


def refusal(use: Callable[[], object], kind: type[Exception]) -> str | None:
    """The message of the error of this `kind` that `use` raises; None if it raises none."""
    try:
        use()
    except kind as error:
        return str(error)
    return None
