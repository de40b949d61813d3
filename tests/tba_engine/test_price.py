"""What each byte, or record, that moves is taken to cost, given what steps have shown."""

from __future__ import annotations

import pytest

from tba._auto.price import Price


def test_of_watched_steps_the_cheapest_tells() -> None:
    price = Price()
    assert [price.learn(each_s, 100, planned=False) for each_s in (3.0, 5.0, 2.0)] == [3.0, 3.0, 2.0]


def test_a_planned_step_tells_half_whether_dearer_or_cheaper() -> None:
    price = Price()
    price.learn(4.0, 100, planned=False)
    assert [price.learn(each_s, 100, planned=True) for each_s in (2.0, 5.0)] == [3.0, 4.0]


def test_a_planned_step_that_moves_little_tells_little() -> None:
    price = Price()
    price.learn(4.0, 100, planned=False)
    for _ in range(10):
        price.learn(12.0, 1, planned=True)
    assert price.each_s == pytest.approx(4.4, abs=0.02)
    price.learn(12.0, 200, planned=True)  # as many as never before: these tell the most
    assert price.each_s == pytest.approx(8.2, abs=0.02)


@pytest.mark.parametrize("planned", [False, True])
def test_a_step_that_moves_nothing_tells_nothing(planned: bool) -> None:
    price = Price()
    assert price.learn(0.0, 0, planned=planned) == 0.0
    price.learn(2.0, 10, planned=planned)
    assert price.learn(0.0, 0, planned=planned) == price.learn(0.0, 5, planned=planned) == 2.0
