"""Agreement: meetings end alike for all ranks, whoever refuses, is late or leaves."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch.distributed as dist

from tba._group import agreement as agreements
from tba._group.agreement import Agreement, Spent

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

RANKS = 3


def _each(main: Callable[[int, Agreement], Any]) -> list[Any]:
    """What `main` returns on each rank of one agreement; a rank is a thread here."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        agreement = Agreement(store, rank, 60.0)
        # A chain: the first and the last exchange nothing with each other.
        assert agreement.form(frozenset({max(0, rank - 1), min(RANKS - 1, rank + 1)}))
        assert agreement.members == tuple(range(RANKS))
        return main(rank, agreement)

    with warnings.catch_warnings(), ThreadPoolExecutor(RANKS) as pool:
        warnings.simplefilter("ignore")
        return list(pool.map(run, range(RANKS)))


def test_all_ranks_get_what_the_lowest_concludes_from_what_all_said() -> None:
    def main(rank: int, agreement: Agreement) -> Any:
        return [agreement.decide(str(turn), (rank, turn), lambda said: (rank, said)) for turn in range(20)]

    expected = [(0, [(rank, turn) for rank in range(RANKS)]) for turn in range(20)]
    assert _each(main) == [expected] * RANKS


def test_nobody_waits_for_a_lowest_rank_that_cannot_conclude(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(agreements, "warn", told.append)

    def conclude(_: list[int]) -> None:
        raise MemoryError("no room")

    def main(rank: int, agreement: Agreement) -> Any:
        try:
            found = agreement.decide("one", rank, conclude)
        except MemoryError as error:
            found = str(error)
        return found, agreement.lost, agreement.all_in("two")

    assert _each(main) == [("no room", True, False), *[(None, True, False)] * (RANKS - 1)]
    assert len(told) == RANKS
    assert not any("within" in each for each in told)  # which is what it says where it has waited


def test_a_rank_that_refuses_lets_one_meeting_fail_for_all() -> None:
    def main(rank: int, agreement: Agreement) -> Any:
        if rank == 1:
            agreement.refuse("one")
        else:
            assert not agreement.all_in("one")
        return agreement.all_in("two"), agreement.lost

    assert _each(main) == [(True, False)] * RANKS


def test_ranks_that_would_do_different_things_do_not_meet() -> None:
    def main(rank: int, agreement: Agreement) -> Any:
        alike = agreement.is_alike("which", "this" if rank else "that")
        if not alike:
            agreement.refuse("one")
        met = alike and agreement.all_in("one")
        assert agreement.is_alike("then", "this")
        return met, agreement.all_in("two")

    assert _each(main) == [(False, True)] * RANKS


@pytest.mark.parametrize("how", ["is late", "leaves"])
def test_a_rank_that_is_late_or_leaves_ends_the_agreement_for_all(how: str) -> None:
    done: list[int] = []

    def main(rank: int, agreement: Agreement) -> Any:
        assert agreement.all_in("one")
        if rank == 1:
            if how == "leaves":
                agreement.leave("two")
            while how == "is late" and len(done) < RANKS - 1:
                time.sleep(1e-3)  # until the others have given it up
        elif how == "is late":
            agreement.timeout_s = 0.01
        found = agreement.all_in("two"), agreement.decide("three", 1, sum), agreement.lost
        done.append(rank)
        return found

    assert _each(main) == [(False, None, True)] * RANKS


def test_a_rank_that_leaves_ends_the_agreement_where_another_has_refused_too() -> None:
    left = Event()

    def main(rank: int, agreement: Agreement) -> tuple[bool, bool]:
        if rank == 1:
            agreement.refuse("one")
            refused.set()
            return False, True
        refused.wait(60)
        if rank == 2:
            agreement.leave("one")
            left.set()
        left.wait(60)
        return agreement.all_in("one"), agreement.lost

    refused = Event()
    assert _each(main) == [(False, True)] * RANKS


def test_forming_has_one_deadline_however_many_ranks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others tell one after the other, each a little before the time is over that the first was waited for."""
    store, now_s, others = dist.HashStore(), 0.0, [1, 2, 3]

    def sleep(_: float) -> None:
        nonlocal now_s
        now_s += 0.9
        if others:
            store.set(f"peers/{others.pop(0)}", "0,1,2,3")

    monkeypatch.setattr(agreements.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(agreements.time, "sleep", sleep)
    agreement = Agreement(store, 0, 1.0)
    with pytest.warns(UserWarning, match="rank 3 has not told within 1 s"):
        assert not agreement.form(frozenset(range(4)))
    assert now_s == 1.8


class _InOrder:
    """A rank's store, at whose meeting "one" an operation waits for what other ranks do first."""

    def __init__(self, store: dist.Store, rank: int, order: dict[str, list[str]], done: dict[str, Event]) -> None:
        self._store, self._rank, self._order, self._done = store, rank, order, done

    def __getattr__(self, name: str) -> Any:
        operation, step = getattr(self._store, name), f"{self._rank} {name}"

        def in_order(*args: Any) -> Any:
            if "one" not in str(args[0]):
                return operation(*args)
            self._done[f"{step} begins"].set()
            assert all(self._done[each].wait(60) for each in self._order.get(step, ()))
            found = operation(*args)
            self._done[step].set()
            return found

        return in_order


@pytest.mark.parametrize(
    ("met", "order"),
    [
        # The last has come; before it can say so, a rank has given up.
        (False, {"2 add": ["0 add", "1 add"], "0 check": ["2 add"], "2 compare_set": ["0"]}),
        # A rank gives up; before it can say so, the last has come, and others have gone on.
        (True, {"2 add": ["1 add", "0 compare_set begins"], "0 compare_set": ["1", "2"]}),
        # The same, but one looks only when both have gone on.
        (True, {"2 add": ["1 add", "0 compare_set begins"], "0 compare_set": ["2"], "1 check": ["0", "2"]}),
    ],
)
def test_a_meeting_ends_alike_for_all_where_a_rank_gives_up_just_as_the_last_one_comes(
    met: bool, order: dict[str, list[str]]
) -> None:
    store, operations = dist.HashStore(), ("add", "check", "get", "compare_set")
    steps = [(str(rank), f"{rank} {each}", f"{rank} {each} begins") for rank in range(RANKS) for each in operations]
    done = {step: Event() for each in steps for step in each}

    def run(rank: int) -> bool:
        agreement = Agreement(_InOrder(store, rank, order, done), rank, 60.0)
        assert agreement.form(frozenset(range(RANKS)))
        agreement.timeout_s = 60.0 if rank else 0.0
        found = agreement.all_in("one")
        done[str(rank)].set()
        assert agreement.lost is not found
        return found

    with warnings.catch_warnings(), ThreadPoolExecutor(RANKS) as pool:
        warnings.simplefilter("ignore")
        assert list(pool.map(run, range(RANKS))) == [met] * RANKS


def test_groups_of_one_job_do_not_meet_each_other() -> None:
    store = dist.HashStore()

    def run(rank: int) -> Any:
        agreement = Agreement(store, rank, 60.0)
        agreement.form(frozenset({rank, rank ^ 1}))
        if rank == 1:
            agreement.refuse("one")
        return rank == 1 or agreement.all_in("one"), agreement.decide("two", rank, sum)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == [(False, 1), (True, 1), (True, 5), (True, 5)]


def test_what_is_stored_does_not_grow_with_meetings() -> None:
    store = dist.HashStore()
    both = [Agreement(store, rank, 60.0) for rank in range(2)]
    sizes = []
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda each: each.form(frozenset({0, 1})), both))
        for turn in range(6):
            assert list(pool.map(lambda each: each.decide(str(turn), 1, sum), both)) == [2, 2]  # noqa: B023
            both[0].tidy()
            sizes.append(store.num_keys())
    assert len(set(sizes[1:])) == 1


def test_time_spent_counts_once_where_one_use_is_within_another(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((1.0, 5.0, 10.0, 11.0))
    monkeypatch.setattr(agreements.time, "perf_counter", lambda: next(times))
    spent = Spent()
    with spent:
        with spent:
            pass
        with spent:
            pass
    assert spent.seconds == 4.0
    with spent:
        pass
    assert spent.seconds == 5.0
