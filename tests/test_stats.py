"""Statistics: counters that add up, snapshots that stay as they are, and a step as the difference of two."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import pytest

from tba import OffloadStats
from tba._stats import _SUMS, Counters, difference

DERIVED = {"saved_bytes", "kept_bytes"}
OTHERS = {"file_bytes", "written_today_bytes", "projected_bytes_per_day"}  # readings that are no counters
READINGS = {"live_records", "resident_bytes", "staging_peak_bytes", *OTHERS}


def counters_of(**values: int) -> Counters:
    counters = Counters()
    for name, value in values.items():
        setattr(counters, name, value)
    return counters


def take(counters: Counters, file_bytes: int = 0) -> OffloadStats:
    return counters.snapshot(file_bytes=file_bytes)


def test_every_field_is_a_sum_or_a_reading() -> None:
    """A field that is neither would be wrong in `last_step`."""
    names = {field.name for field in dataclasses.fields(OffloadStats)}
    assert names == {*_SUMS, *DERIVED, *READINGS, "kept_by_reason", "last_step"}
    assert set(Counters.__slots__) == names - {*DERIVED, *OTHERS, "last_step"}


def test_it_starts_at_nothing() -> None:
    assert take(Counters()) == OffloadStats()


def test_a_snapshot_shows_every_counter() -> None:
    values = {name: number for number, name in enumerate((*_SUMS, *sorted(READINGS - OTHERS)), start=1)}
    counters = counters_of(**values)
    counters.kept_by_reason["nothing"] += 0
    last = OffloadStats(steps=7)
    stats = counters.snapshot(file_bytes=99, last_step=last)
    assert {name: getattr(stats, name) for name in values} == values
    assert stats.file_bytes == 99
    assert stats.last_step is last


def test_a_snapshot_does_not_change() -> None:
    counters = Counters()
    counters.kept_by_reason["fits"] += 10
    stats = take(counters)
    counters.kept_by_reason["fits"] += 10
    counters.weight_bytes += 5
    assert (stats.kept_bytes, stats.saved_bytes, dict(stats.kept_by_reason)) == (10, 10, {"fits": 10})
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.saved_bytes = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        stats.kept_by_reason["fits"] = 1  # type: ignore[index]


def test_kept_bytes_are_counted_by_reason() -> None:
    counters = Counters()
    for nbytes, reason in ((10, "small"), (5, "FakeTensor"), (7, "small")):
        counters.kept_by_reason[reason] += nbytes
    stats = take(counters)
    assert stats.kept_bytes == sum(stats.kept_by_reason.values()) == 22
    assert stats.kept_by_reason == {"small": 17, "FakeTensor": 5}


def test_what_was_kept_may_go_after_all_and_come_back() -> None:
    counters = Counters()
    counters.kept_by_reason["fits"] += 30
    counters.kept_to_offloaded(20, "fits")
    stats = take(counters)
    assert (stats.kept_bytes, stats.offloaded_bytes, dict(stats.kept_by_reason)) == (10, 20, {"fits": 10})
    counters.kept_to_offloaded(10, "fits")
    assert dict(take(counters).kept_by_reason) == {}  # nothing is left of that reason
    counters.kept_to_offloaded(-30, "write failed")
    stats = take(counters)
    assert (stats.kept_bytes, stats.offloaded_bytes, dict(stats.kept_by_reason)) == (30, 0, {"write failed": 30})
    assert stats.saved_bytes == stats.kept_bytes + stats.offloaded_bytes


def test_a_step_is_what_was_added_and_what_is_now() -> None:
    before = counters_of(**dict.fromkeys(_SUMS, 100), **dict.fromkeys(READINGS - OTHERS, 50))
    before.kept_by_reason["small"] += 70
    before.kept_by_reason["FakeTensor"] += 30
    now = counters_of(**dict.fromkeys(_SUMS, 175), **dict.fromkeys(READINGS - OTHERS, 20))
    now.kept_by_reason["small"] += 70
    now.kept_by_reason["FakeTensor"] += 31
    now.kept_by_reason["empty"] += 74
    step = difference(take(now, file_bytes=8), take(before, file_bytes=6))
    assert {name: getattr(step, name) for name in _SUMS} == dict.fromkeys(_SUMS, 75)
    assert {name: getattr(step, name) for name in READINGS} == {
        **dict.fromkeys(READINGS - OTHERS, 20),
        **dict.fromkeys(OTHERS, 0),
        "file_bytes": 8,
    }
    assert step.kept_by_reason == {"FakeTensor": 1, "empty": 74}
    assert sum(step.kept_by_reason.values()) == step.kept_bytes
    assert step.last_step is None


def test_a_reason_may_lose_bytes_in_a_step() -> None:
    before, now = Counters(), Counters()
    before.kept_by_reason["fits"] += 30
    now.kept_by_reason["fits"] += 30
    now.kept_to_offloaded(20, "fits")
    step = difference(take(now), take(before))
    assert (step.kept_bytes, step.offloaded_bytes, dict(step.kept_by_reason)) == (-20, 20, {"fits": -20})


def test_equal_numbers_are_equal_statistics() -> None:
    first = OffloadStats(saved_bytes=1, kept_by_reason=MappingProxyType({"a": 1}))
    assert first == OffloadStats(saved_bytes=1, kept_by_reason=MappingProxyType({"a": 1}))
    assert first != OffloadStats(saved_bytes=1)
