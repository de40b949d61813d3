"""Stores whose limit changes: what is in them stays, and no more comes in than the limit of now allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from io_backends import HostStore, PosixStore, Store, StoreFull, StripedStore, Ticket, TwoLevelStore
from support.stores import WAIT_S, buffer_of, pattern_at, read_back

MIB = 1 << 20
LIMIT = 8 * MIB  # of each
KINDS: dict[str, Callable[[Path], Store]] = {
    "file": lambda folder: PosixStore(folder, threads=2, capacity_bytes=LIMIT),
    "host": lambda _: HostStore(budget_bytes=LIMIT),
    "two levels": lambda folder: TwoLevelStore(
        HostStore(), PosixStore(folder, threads=1, capacity_bytes=LIMIT * 3 // 4), LIMIT // 4
    ),
}


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Store]:
    store = KINDS[request.param](scratch)
    yield store
    store.close()


def fill(store: Store) -> list[Ticket]:
    """Write 1 MiB after another until no more is taken."""
    tickets: list[Ticket] = []
    while True:
        array = pattern_at(0, MIB, seed=len(tickets))
        ticket = store.write(buffer_of(array))
        try:
            assert ticket.wait(WAIT_S)
        except StoreFull:
            return tickets
        tickets.append(ticket)


def test_a_store_takes_as_much_as_its_share(store: Store) -> None:
    given = LIMIT // 4 if isinstance(store, TwoLevelStore) else 0  # takes what it is given alone
    for share in (1.0, 0.5, 1.5, 0.5):
        store.resize(share)
        assert store.capacity_bytes == share * LIMIT
        tickets = fill(store)
        assert len(tickets) == share * (LIMIT - given) // MIB
        for ticket in tickets:
            store.discard(ticket)
    assert store.used_bytes == 0


def test_what_is_stored_outlasts_a_smaller_share(store: Store) -> None:
    tickets = fill(store)
    store.resize(0.25)
    assert fill(store) == []
    for seed, ticket in enumerate(tickets):
        assert (read_back(store, ticket) == pattern_at(0, MIB, seed=seed)).all()
    for ticket in tickets[1:]:
        store.discard(ticket)
    store.resize(1.0)
    assert len(fill(store)) == len(tickets) - 1


def test_a_file_gives_back_blocks_beyond_its_share(scratch: Path) -> None:
    store = PosixStore(scratch, threads=1, capacity_bytes=LIMIT)
    for ticket in fill(store):
        store.discard(ticket)
    assert store.allocated_bytes() >= LIMIT
    store.resize(0.5)
    store.trim()
    assert store.write(buffer_of(pattern_at(0, MIB))).wait(WAIT_S)  # the one worker has trimmed before
    assert store.allocated_bytes() <= LIMIT // 2
    store.close()


def test_each_of_several_files_takes_its_part(scratch: Path) -> None:
    stores = [PosixStore(scratch, threads=1, capacity_bytes=capacity) for capacity in (LIMIT, 2 * LIMIT)]
    striped = StripedStore(stores)
    striped.resize(0.5)
    assert [store.capacity_bytes for store in stores] == [LIMIT // 2, LIMIT]
    assert striped.capacity_bytes == LIMIT * 3 // 2
    striped.close()


def test_a_store_without_a_limit_has_none_after() -> None:
    store = HostStore()
    store.resize(0.5)
    assert store.capacity_bytes is None
    store.close()
