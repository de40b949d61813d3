"""Samples: of a test with many cases, those that differ most are left in `make test`, always the same ones."""

from __future__ import annotations

import itertools

import pytest

from support import samples

GRID = {f"test[{a}-{b}-{c}]": {"a": a, "b": b, "c": c} for a, b, c in itertools.product(range(4), range(3), range(2))}


def test_four_of_a_grid_show_every_value() -> None:
    found = samples.chosen(GRID, 4)
    assert len(found) == 4
    seen = {value for name in found for value in GRID[name].items()}
    assert seen == {value for case in GRID.values() for value in case.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("one", [1, 2, 3])
@pytest.mark.parametrize("other", ["a", "b", "c"])
def test_three_cases_of_a_test_show_every_value(one: int, other: str, request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if getattr(item, "originalname", "") == request.node.originalname]
    if len(items) < 9 and any(item.get_closest_marker("exhaustive") for item in items):
        pytest.skip("not all cases were collected")
    params = [item.callspec.params for item in items if item.get_closest_marker("exhaustive") is None]  # type: ignore
    assert len(params) == 3
    assert {value for case in params for value in case.values()} == {1, 2, 3, "a", "b", "c"}


@pytest.mark.parametrize("count", [1, 7, 24, 30])
def test_as_many_are_chosen_as_are_asked_for_and_the_same_each_time(count: int) -> None:
    found = samples.chosen(GRID, count)
    assert len(found) == min(count, len(GRID))
    assert samples.chosen(dict(reversed(GRID.items())), count) == found


def test_a_fifth_of_the_examples_is_tried_and_at_least_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "ALL", False)
    assert [samples.examples(count) for count in (300, 60, 25, 4)] == [60, 12, 10, 4]
    monkeypatch.setattr(samples, "ALL", True)
    assert samples.examples(300) == 300
