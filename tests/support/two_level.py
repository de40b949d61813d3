"""What the tests of TwoLevelStore share: stores with faults at will, and what to wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from io_backends import Buffer, HostStore, PosixStore, Store, Syscalls, Ticket
from io_backends._stores.two_level import Place, TwoLevelStore
from io_backends.testing import Fault, FaultyStore, Operation
from support.stores import WAIT_S, Bytes, Plan, buffer_of, empty_at

KIB = 1024
BUDGET = 100 * KIB


class Make(Protocol):
    """Makes a store; `faults` are those of the file store."""

    def __call__(
        self,
        faults: dict[tuple[Operation, int], Fault] | None = None,
        *,
        budget: int = BUDGET,
        threads: int = 2,
        syscalls: Syscalls | None = None,
    ) -> TwoLevelStore: ...


@contextmanager
def maker(scratch: Path) -> Iterator[Make]:
    """A `Make` whose stores are closed in the end."""
    made: list[TwoLevelStore] = []

    def make(
        faults: dict[tuple[Operation, int], Fault] | None = None,
        *,
        budget: int = BUDGET,
        threads: int = 2,
        syscalls: Syscalls | None = None,
    ) -> TwoLevelStore:
        file = FaultyStore(PosixStore(scratch, threads=1, syscalls=syscalls), Plan(faults or {}))
        made.append(TwoLevelStore(HostStore(), file, budget, threads=threads))
        return made[-1]

    yield make
    for store in made:
        store.close()


def file_bytes_in_use(store: TwoLevelStore) -> int:
    """Bytes of the file that belong to writes."""
    assert isinstance(store._file, FaultyStore)
    assert isinstance(store._file._store, PosixStore)
    return store._file._store.used_bytes


def places(*tickets: Ticket) -> list[str]:
    return [ticket.location.place.name for ticket in tickets]


def given(array: Bytes) -> Buffer:
    """Memory that the store may keep."""
    return buffer_of(array)._replace(given=True)


def write(store: Store, array: Bytes) -> Ticket:
    """A finished write of memory that the store may keep. Raises its error."""
    ticket = store.write(given(array))
    assert ticket.wait(WAIT_S)
    return ticket


def read(store: Store, ticket: Ticket, *, padded: bool = True) -> Bytes:
    array = empty_at(ticket.location.skew if padded else 77, ticket.nbytes)
    assert store.read(ticket.location, buffer_of(array, padded=padded)).wait(WAIT_S)
    return array


def await_spill(store: TwoLevelStore, ticket: Ticket) -> None:
    """Until `ticket`'s bytes are on their way to the file."""
    deadline = threading.Event()
    for _ in range(6000):
        if ticket.location.place is Place.SPILLING and ticket.location.file is not None:
            return
        deadline.wait(0.01)
    raise AssertionError(f"{ticket.location.place} after a minute")


def waits(gate: threading.Event) -> None:
    assert gate.wait(WAIT_S)
