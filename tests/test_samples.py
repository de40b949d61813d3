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


def test_each_case_is_of_one_share() -> None:
    names = [f"test[{number}]" for number in range(20 * samples.SHARES)]
    shares = [{name for name in names if samples.is_of_share(name, share)} for share in range(samples.SHARES)]
    assert sum(map(len, shares)) == len(set.union(*shares)) == len(names)
    assert min(map(len, shares)) > 0
    assert {name for name in names if samples.is_of_share(name, 0x1234567)} == shares[0x1234567 % samples.SHARES]


def test_a_share_leaves_out_exhaustive_cases_alone(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = request.session.items
    monkeypatch.delenv("SHARE", raising=False)
    assert not samples.others_share(items)
    monkeypatch.setenv("SHARE", "1")
    others = samples.others_share(items)
    assert all(item.get_closest_marker("exhaustive") is not None for item in others)
    assert not any(samples.is_of_share(item.nodeid, 1) for item in others)
