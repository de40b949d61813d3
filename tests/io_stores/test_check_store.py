"""The contract suite over every store, plain and wrapped, and over stores that break it, one promise each."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from io_backends import Buffer, HostStore, PosixStore, Store, StripedStore, Syscalls, Ticket
from io_backends.testing import FaultyStore, check_store


def no_direct_open(path: str, flags: int, mode: int) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return os.open(path, flags, mode)


def striped(directory: Path) -> Store:
    return StripedStore([PosixStore(directory), PosixStore(directory, threads=1, syscalls=BUFFERED)])


BUFFERED = Syscalls(open=no_direct_open)
STORES: dict[str, Callable[[Path], Store]] = {
    "direct": PosixStore,
    "one worker": lambda directory: PosixStore(directory, threads=1),
    "buffered": lambda directory: PosixStore(directory, syscalls=BUFFERED),
    "checksum": lambda directory: PosixStore(directory, threads=3, checksum=True),
    "paced": lambda directory: PosixStore(directory, write_rate_bytes_per_s=1e12, read_rate_bytes_per_s=1e12),
    "striped": striped,
    "striped, one path": lambda directory: StripedStore([PosixStore(directory)]),
    "striped hosts": lambda _: StripedStore([HostStore(), HostStore()]),
    "host": lambda _: HostStore(),
}
KEEP_MEMORY = {"host", "striped hosts"}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("name", STORES)
def test_stores_keep_the_contract(name: str, wrapped: bool, scratch: Path) -> None:
    def make() -> Store:
        store = STORES[name](scratch)
        return FaultyStore(store, lambda operation, number: None) if wrapped else store

    check_store(make, keeps_memory=name in KEEP_MEMORY)


class Least(Store):
    """Has what a store has to have, and nothing more."""

    def __init__(self) -> None:
        self._store = HostStore()

    def submit_write(self, buffer: Buffer, on_done: Any, before: Any) -> Ticket:
        return self._store.submit_write(buffer, on_done, before)

    def submit_read(self, location: Any, buffer: Buffer, on_done: Any, before: Any) -> Ticket:
        return self._store.submit_read(location, buffer, on_done, before)

    def discard(self, ticket: Ticket) -> None:
        self._store.discard(ticket)

    def allocated_bytes(self) -> int:
        return self._store.allocated_bytes()

    def close(self) -> None:
        self._store.close()

    def abandon(self) -> None:
        self._store.abandon()


def test_a_store_with_nothing_but_defaults_keeps_the_contract() -> None:
    check_store(Least, keeps_memory=True)
    store = Least()
    ticket = store.write(b"0123456789")
    assert ticket.wait(60)
    assert (store.alignment, store.takes_device_memory, store.threshold_bytes, store.used_bytes) == (1, False, 0, 10)
    assert store.resident(ticket.location) is None
    store.trim()
    store.close()
    with pytest.raises(TypeError, match="abstract"):
        Store()  # type: ignore[abstract]


def test_wrapped_stores_tell_what_they_wrap(scratch: Path) -> None:
    host = FaultyStore(StripedStore([HostStore()]), lambda operation, number: None)
    memory = bytearray(b"0123456789")
    ticket = host.write(memory)
    assert ticket.wait(60)
    there = host.resident(ticket.location)
    assert there is not None
    assert there.nbytes == host.used_bytes == 10
    host.discard(ticket)
    assert host.resident(ticket.location) is None
    host.close()


# -- the suite itself ------------------------------------------------------------------------------------------------


class Bent(FaultyStore):
    """A good store with one thing changed."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, lambda operation, number: None)


class FlipsABit(Bent):
    def read(self, location: Any, buffer: Buffer, **callbacks: Any) -> Ticket:
        on_done = callbacks.pop("on_done", None)

        def flip(ticket: Ticket) -> None:
            if buffer.nbytes == 4096:
                ctypes.c_ubyte.from_address(buffer.address + 4000).value ^= 1
            if on_done is not None:
                on_done(ticket)

        return super().read(location, buffer, on_done=flip, **callbacks)


class WritesBeside(Bent):
    def read(self, location: Any, buffer: Buffer, **callbacks: Any) -> Ticket:
        return super().read(location, buffer._replace(padded=True), **callbacks)


class HoldsMemory(Bent):
    held: list[object] = []  # noqa: RUF012

    def write(self, buffer: Buffer, **callbacks: Any) -> Ticket:
        self.held.append(buffer.owner)
        return super().write(buffer, **callbacks)


class LosesCallback(Bent):
    def write(self, buffer: Buffer, *, on_done: Any = None, before: Any = None) -> Ticket:
        return super().write(buffer, before=before)


class CallsTwice(Bent):
    def write(self, buffer: Buffer, *, on_done: Any = None, before: Any = None) -> Ticket:
        def twice(ticket: Ticket) -> None:
            on_done(ticket)
            on_done(ticket)

        return super().write(buffer, on_done=twice if on_done is not None else None, before=before)


class SwallowsErrors(Bent):
    def write(self, buffer: Buffer, *, on_done: Any = None, before: Any = None) -> Ticket:
        def careless() -> None:
            with suppress(OSError):
                before()

        return super().write(buffer, on_done=on_done, before=careless if before is not None else None)


class TakesAnySize(Bent):
    def read(self, location: Any, buffer: Buffer, **callbacks: Any) -> Ticket:
        return super().read(location, buffer._replace(nbytes=location.nbytes), **callbacks)


class NeverFrees(Bent):
    def discard(self, ticket: Ticket) -> None:
        ticket.cancel()


class ClosesNothing(Bent):
    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class LeavesAThread(Bent):
    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.end.wait, args=(60,), name="left", daemon=True)
        self.thread.start()
        leavers.append(self)


leavers: list[LeavesAThread] = []


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (FlipsABit, "4096 bytes at an address of 0 .*other bytes came back"),
        (WritesBeside, "a read wrote beside its range"),
        (HoldsMemory, "the memory of a write that has ended is still held"),
        (LosesCallback, "on_done"),
        (CallsTwice, "on_done saw|what ran"),
        (SwallowsErrors, "told to fail"),
        (TakesAnySize, "reading 1000 bytes into a buffer of 0 raised no ValueError"),
        (NeverFrees, "allocated bytes grew"),
        (ClosesNothing, "close failed none of them"),
        (LeavesAThread, "Nothing is left behind after close.*thread left"),
    ],
)
def test_a_store_that_breaks_a_promise_is_told_which(
    kind: type[Bent], promise: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from io_backends._testing import contract

    monkeypatch.setattr(contract, "_GRACE_S", 0.1)
    beneath: list[PosixStore] = []

    def make() -> Store:
        beneath.append(PosixStore(scratch))
        return kind(beneath[-1])

    with pytest.raises(AssertionError, match=promise):
        check_store(make)
    for store in beneath:
        store.close()
    for leaver in leavers:
        leaver.end.set()
        leaver.thread.join()
    HoldsMemory.held.clear()
