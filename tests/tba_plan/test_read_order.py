"""Read order: what is expected next, before and after an order is known, and where backward departs from it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.samples import examples
from tba._plan import read_order
from tba._plan.read_order import Orders, Walk

STEADY = settings(derandomize=True, database=None, deadline=None, max_examples=examples(100))


def walked(orders: Orders, asked: list[int], kind: str = "kind") -> Walk:
    """A walk over the given numbers, learned."""
    walk = orders.begin(asked[0], kind)
    for number in asked:
        walk.ask(number)
    orders.learn(walk)
    return walk


def ahead(walk: Walk, lowest: int = 0, most: int = 1000) -> list[int]:
    """The next numbers expected, taken one after the other."""
    found: list[int] = []
    while len(found) < most and (number := walk.peek(lowest)) is not None:
        found.append(number)
        walk.take()
    return found


def test_reverse_pack_order_before_an_order_is_known() -> None:
    walk = Orders().begin(9, "kind")
    walk.ask(9)
    assert ahead(walk, lowest=4) == [8, 7, 6, 5, 4]
    assert walk.peek(4) is None


def test_reverse_order_goes_on_below_what_was_asked_for() -> None:
    walk = Orders().begin(9, "kind")
    walk.ask(9)
    assert ahead(walk, most=1) == [8]
    walk.ask(5)  # 7 and 6 belong to a branch that backward passes over
    assert ahead(walk, lowest=2) == [4, 3, 2]


def test_micro_batches_share_one_order_however_they_are_interleaved() -> None:
    """1F1B: forwards 0, 1, then backward 0, forward 2, backward 1, backward 2; each graph packs four records."""
    orders = Orders()
    order = [3, 0, 2, 1]
    walked(orders, order)
    first, second = orders.begin(7, "kind"), orders.begin(15, "kind")  # packed at 4..7 and, after another, at 12..15
    first.ask(7)
    second.ask(15)
    assert ahead(first, most=1) == [4]
    assert ahead(second, most=2) == [12, 14]
    first.ask(4)
    second.ask(12)
    assert ahead(first) == [6, 5]
    assert ahead(second) == [13]


def test_kinds_have_orders_of_their_own() -> None:
    orders = Orders()
    walked(orders, [5, 2, 4], "encoder")
    walked(orders, [5, 0, 1], "decoder")
    assert ahead(orders.begin(5, "encoder")) == [5, 2, 4]  # the first one, until it is asked for, is expected too
    assert ahead(orders.begin(5, "decoder")) == [5, 0, 1]
    assert ahead(orders.begin(5, "other"), lowest=3) == [5, 4, 3]


def test_what_was_not_foreseen_disturbs_nothing() -> None:
    orders = Orders()
    walked(orders, [5, 4, 3, 2])
    walk = orders.begin(5, "kind")
    for number in (5, 50, 4):
        walk.ask(number)
    assert ahead(walk) == [3, 2]
    orders.learn(walk)
    again = orders.begin(5, "kind")
    again.ask(5)
    assert ahead(again) == [50, 4]  # and is expected the next time


def test_a_walk_that_goes_on_past_its_order_goes_on_downwards() -> None:
    orders = Orders()
    walked(orders, [9, 7, 8])
    walk = orders.begin(29, "kind")
    for number in (29, 27):
        walk.ask(number)
    assert ahead(walk) == [28]  # below may be another graph's
    walk.ask(40)  # a later graph beneath the same backward
    assert walk.peek(0) is None
    walk.ask(28)
    walk.ask(26)
    assert ahead(walk, lowest=22) == [25, 24, 23, 22]
    orders.learn(walk)
    assert ahead(orders.begin(9, "kind")) == [9, 7, 20, 8, 6]


def test_only_so_many_kinds_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_order, "_MAX_ORDERS", 3)
    orders = Orders()
    for kind in ("a", "b", "c", "a", "d"):  # a is learned again before d comes, so b is the oldest
        walked(orders, [5, 1, 3], kind)
    expected = {kind: ahead(orders.begin(5, kind), lowest=4) for kind in "abcd"}
    assert expected == {"a": [5, 1, 3], "b": [5, 4], "c": [5, 1, 3], "d": [5, 1, 3]}


@STEADY
@given(order=st.permutations(list(range(12))), shift=st.integers(-100, 100), reach=st.integers(1, 12))
def test_a_walk_that_repeats_the_last_is_foreseen_in_full(order: list[int], shift: int, reach: int) -> None:
    """Each is on its way before it is asked for, in the order of asking, never twice, at any depth of read-ahead."""
    orders = Orders()
    walked(orders, order)
    walk = orders.begin(order[0] + shift, "kind")
    taken: list[int] = []
    for place, number in enumerate(order):
        walk.ask(number + shift)
        assert place == 0 or number + shift in taken
        taken += ahead(walk, lowest=-1000, most=reach - (len(taken) - place))
    assert taken == [number + shift for number in order[1:]]


@STEADY
@given(
    order=st.permutations(list(range(10))),
    asked=st.lists(st.integers(-3, 14), min_size=1, max_size=20),
    known=st.booleans(),
)
def test_whatever_backward_does_nothing_asked_for_is_expected(order: list[int], asked: list[int], known: bool) -> None:
    orders = Orders()
    if known:
        walked(orders, order)
    walk = orders.begin(asked[0], "kind")
    seen: set[int] = set()
    for number in asked:
        walk.ask(number)
        seen.add(number)
        following = walk.peek(-5)
        assert following is None or following not in seen
        walk.take()
    assert walk.distances == [number - asked[0] for number in dict.fromkeys(asked)]
