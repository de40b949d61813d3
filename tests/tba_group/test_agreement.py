"""Agreement: meetings end alike for all ranks, whoever refuses, is late or leaves."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
