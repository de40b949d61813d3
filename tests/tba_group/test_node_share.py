"""Node shares: never more than the node has, whatever ranks need and however they interleave."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from support.samples import examples
from tba._group import node_share
from tba._group.node_share import NodeShare, share_of

MIB = 1 << 20
STEADY = settings(derandomize=True, database=None, deadline=None, max_examples=examples(60))


class Store:
    """Sums, as a job's store has them. While one rank has added, others may take whole steps."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.meanwhile: list[Any] = []  # steps of others, each at the end of one addition

    def add(self, key: str, value: int) -> int:
        self.sums[key] += value
        found = self.sums[key]
        if self.meanwhile:
            self.meanwhile.pop()()
        return found


def _ranks(monkeypatch: pytest.MonkeyPatch, store: Any, count: int) -> list[NodeShare]:
    monkeypatch.setattr(node_share, "job_store", lambda prefix: (store, 0))
    return [NodeShare(count) for _ in range(count)]


@STEADY
@given(data=st.data(), count=st.integers(2, 5))
def test_shares_never_exceed_the_node(data: st.DataObject, count: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        store = Store()
        ranks = _ranks(monkeypatch, store, count)
        stepping: set[int] = set()

        def step(which: int, need_bytes: int) -> None:
            if which in stepping:
                return
            stepping.add(which)
            ranks[which].take(need_bytes)
            stepping.discard(which)
            assert sum(each.share for each in ranks) <= count + 1e-9
            assert all(each.share >= 0.25 - 1e-5 for each in ranks)

        steps = st.tuples(st.integers(0, count - 1), st.integers(0, 1 << 32))
        for which, need_bytes in data.draw(st.lists(steps, max_size=40)):
            others = data.draw(st.lists(steps, max_size=3))
            store.meanwhile = [lambda other=other: step(*other) for other in others]
            step(which, need_bytes)


def test_ranks_end_with_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _ranks(monkeypatch, dist.HashStore(), 4)
    for each in ranks[:3]:
        each.take(MIB)
    assert [each.share for each in ranks] == [1.0] * 4, "one has not told its need"
    for _ in range(4):
        for each, need in zip(ranks, (4, 3, 2, 1), strict=True):
            each.take(need * MIB)
    assert [each.share for each in ranks] == pytest.approx([1.45, 1.15, 0.85, 0.55], abs=1e-4)


def test_a_rank_that_needs_more_later_gets_it_once_others_have_made_room(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = first, second = _ranks(monkeypatch, dist.HashStore(), 2)
    for _ in range(4):
        first.take(3 * MIB)
        second.take(MIB)
    assert [each.share for each in ranks] == pytest.approx([1.375, 0.625], abs=1e-4)
    for _ in range(2):
        second.take(3 * MIB)
        assert second.share == pytest.approx(0.625, abs=1e-4), "the other has not made room yet"
        first.take(MIB)
    second.take(3 * MIB)
    assert [each.share for each in ranks] == pytest.approx([1.0, 1.0], abs=1e-4)


def test_the_store_is_looked_at_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    first, second = _ranks(monkeypatch, store, 2)
    asked = 0

    def count(prefix: str) -> Any:
        nonlocal asked
        asked += 1
        return store, 0

    monkeypatch.setattr(node_share, "job_store", count)
    for _ in range(1024):
        first.take(MIB)
    assert asked == 8 + 2 + 1024 // 64, "each of the first 8 steps, the 16th, the 32nd, and then every 64th"
    first.take(9 * MIB // 8 + 1024)
    assert asked == 27, "a need that is clearly larger is told at once"
    assert second.share == 1.0


def test_a_rank_alone_and_one_whose_store_is_gone_keep_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_share, "job_store", lambda prefix: pytest.fail("one rank asks nobody"))
    assert NodeShare(1).take(MIB) == 1.0

    class Gone:
        def add(self, key: str, value: int) -> int:
            raise RuntimeError("connection closed")

    (rank, _) = _ranks(monkeypatch, Gone(), 2)
    assert [rank.take(MIB), rank.take(MIB)] == [1.0, 1.0]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_shares_by_need_add_up(count: int) -> None:
    needs = [each**2 for each in range(1, count + 1)]
    assert sum(share_of(each, sum(needs), count) for each in needs) == pytest.approx(count)
