"""Statistics: counters that add up, snapshots that stay as they are, and a step as the difference of two."""

from __future__ import annotations

import dataclasses
import json
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

import pytest

from tba import OffloadStats
from tba._stats import _SUMS, Counters, Situation, difference
from tba._text import size

DERIVED = {"saved_bytes", "kept_bytes"}
OTHERS = {
    "file_bytes",
    "written_today_bytes",
    "projected_bytes_per_day",
    "plain_peak_bytes",
    "step_peak_bytes",
}  # readings that are no counters
READINGS = {"live_records", "resident_bytes", "peak_bytes", "held_bytes", "staging_peak_bytes", *OTHERS}


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
    assert names == {*_SUMS, *DERIVED, *READINGS, "kept_by_reason", "situation", "last_step"}
    assert set(Counters.__slots__) == names - {*DERIVED, *OTHERS, "situation", "last_step"}


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


# -- for people and for machines ---------------------------------------------------------------------------------------

MIB = 1 << 20
STEP = OffloadStats(
    saved_bytes=100 * MIB,
    weight_bytes=20 * MIB,
    kept_bytes=5 * MIB,
    offloaded_bytes=75 * MIB,
    written_bytes=60 * MIB,
    wait_s=0.25,
    step_s=2.0,
    steps=1,
    micro_batches=1,
    plain_peak_bytes=80 * MIB,
    step_peak_bytes=20 * MIB,
    staging_peak_bytes=16 * MIB,
    kept_by_reason=MappingProxyType({"below min_tensor_bytes": 5 * MIB}),
)
TOTAL = dataclasses.replace(
    STEP,
    saved_bytes=1000 * MIB,
    weight_bytes=200 * MIB,
    kept_bytes=50 * MIB,
    offloaded_bytes=750 * MIB,
    written_bytes=600 * MIB,
    wait_s=1.0,
    step_s=500.0,
    steps=10,
    kept_by_reason=MappingProxyType({"below min_tensor_bytes": 50 * MIB}),
    last_step=STEP,
)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (12 * MIB, "12.0 MiB"),
        (-2 * MIB, "-2.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_a_size_has_one_decimal_and_the_largest_unit_below_it(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_printed_it_is_a_table_of_what_is_not_zero() -> None:
    lines = str(TOTAL).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "saved tensors 80 -> 20 MiB (-75%), waited 12%",
        "total last step",
        "steps 10 1",
        "took 500.00 s 2.00 s",
        "micro-batches 1 1",
        "saved by autograd 1000.0 MiB 100.0 MiB",
        "weights, left alone 200.0 MiB 20% 20.0 MiB 20%",
        "handed to the tier 750.0 MiB 75% 75.0 MiB 75%",
        "kept 50.0 MiB 5% 5.0 MiB 5%",
        "below min_tensor_bytes 50.0 MiB 5% 5.0 MiB 5%",
        "written 600.0 MiB 60.0 MiB",
        "backward waited 1.00 s <1% 0.25 s 12%",
        "most in flight to the tier 16.0 MiB",
        "a step waits 12% of its time for the tier: `tba doctor` measures the disks; a larger memory_budget, "
        "compress='exact' or another storage path reduces the waiting.",
    ]
    assert lines[8].startswith("  kept")  # parts are indented below what they are parts of
    assert lines[9].startswith("    below")
    assert len({line.index(".0 MiB") for line in lines[5:9]}) == 1  # numbers stand below one another


def test_without_a_step_there_is_one_column() -> None:
    assert str(OffloadStats(steps=2)).split() == ["nothing", "saved", "yet", "total", "steps", "2"]
    assert str(OffloadStats()).split() == ["nothing", "saved", "yet", "total"]


FITS = OffloadStats(
    **dict.fromkeys(("saved_bytes", "kept_bytes", "plain_peak_bytes", "step_peak_bytes"), 244 * MIB),
    steps=1,
    micro_batches=1,
    step_s=1.0,
    kept_by_reason=MappingProxyType({"below min_tensor_bytes": MIB, "fits in memory": 243 * MIB}),
)
MOVED = dataclasses.replace(FITS, written_bytes=MIB, offloaded_bytes=MIB, step_peak_bytes=80 * MIB)


@pytest.mark.parametrize(
    ("stats", "changes", "situation", "line"),
    [
        (OffloadStats(), {}, {}, "nothing saved yet"),
        (OffloadStats(), {}, {"entered": False}, "nothing saved yet: the context was not entered"),
        (
            OffloadStats(),
            {},
            {"entered": False, "closed": True},
            "nothing saved yet: the context was not entered; closed",
        ),
        (
            FITS,
            {"micro_batches": 0, "weight_bytes": 144 * MIB},
            {},
            "saved tensors 100 MiB so far: the first step is not over",
        ),
        (FITS, {"plain_peak_bytes": 0}, {}, "no saved tensors but weights"),
        (FITS, {}, {}, "saved tensors 244 MiB, all in memory: they fit"),
        (FITS, {}, {"hooks": "off"}, "saved tensors 244 MiB, all in memory: they fit; hooks off"),
        (
            FITS,
            {},
            {"hooks": "off", "since": 2},
            "saved tensors 244 MiB, all in memory: they fit; hooks off since step 2",
        ),
        (
            FITS,
            {},
            {"hooks": "count", "since": 1024},
            "saved tensors 244 MiB, all in memory: they fit; hooks only count since step 1,024",
        ),
        (
            FITS,
            {"kept_by_reason": {}},
            {"hooks": "count", "since": 9},
            "saved tensors 244 MiB, all in memory: they fit; hooks only count since step 9",
        ),
        (FITS, {"kept_by_reason": {}}, {}, "saved tensors 244 MiB, all in memory"),
        (
            FITS,
            {"kept_by_reason": {"tier keep": 1}},
            {"tier": "keep"},
            "saved tensors 244 MiB, all in memory: tier keep",
        ),
        (
            FITS,
            {"kept_by_reason": {"write failed": 1}, "errors": 3},
            {},
            "saved tensors 244 MiB, all in memory: write failed; 3 transfers failed",
        ),
        (
            FITS,
            {"offloaded_bytes": MIB},
            {"tier": "nvme"},
            "saved tensors 244 MiB, all held back in memory: nothing was written",
        ),
        (
            FITS,
            {"unseen_bytes": MIB},
            {},
            "saved tensors 244 MiB, all in memory: they fit; 1 MiB more in the cache of selective checkpointing",
        ),
        (MOVED, {}, {"planned": True, "step_ratio": 1.012}, "saved tensors 244 -> 80 MiB (-67%), step +1%, waited 0%"),
        (MOVED, {"wait_s": 0.1, "backpressure_s": 0.02}, {}, "saved tensors 244 -> 80 MiB (-67%), waited 12%"),
        (
            MOVED,
            {"errors": 1000},
            {"closed": True},
            "saved tensors 244 -> 80 MiB (-67%), waited 0%; 1,000 transfers failed; closed",
        ),
        (MOVED, {"plain_peak_bytes": 1536 * MIB}, {}, "saved tensors 1.5 GiB -> 80 MiB (-95%), waited 0%"),
        (FITS, {"encoded_bytes": 1, "step_peak_bytes": 61 * MIB}, {}, "saved tensors 244 -> 61 MiB (-75%), waited 0%"),
        (FITS, {"step_peak_bytes": 61 * MIB}, {"planned": True}, "saved tensors 244 -> 61 MiB (-75%), waited 0%"),
    ],
)
def test_a_verdict_is_one_line_for_each_state(
    stats: OffloadStats, changes: dict[str, Any], situation: dict[str, Any], line: str
) -> None:
    stats = dataclasses.replace(stats, **changes, situation=Situation(**situation))
    assert stats.verdict == line
    assert str(stats).splitlines()[0] == stats.asdict()["verdict"] == line


def test_a_step_that_fits_in_what_is_held_back_says_why_nothing_was_written() -> None:
    held = dataclasses.replace(STEP, written_bytes=0, staging_peak_bytes=0, held_bytes=75 * MIB)
    (note,) = [note for note in held.notes() if "nothing was written" in note]
    assert "held back for backward, which needs it first (75.0 MiB at most)" in note
    assert "TBA_PREFETCH_BYTES" in note
    for other in (STEP, dataclasses.replace(held, staging_peak_bytes=1), OffloadStats()):
        assert not [note for note in other.notes() if "nothing was written" in note]


def test_failures_and_unseen_bytes_are_told() -> None:
    assert STEP.notes() == TOTAL.notes()
    (*_, failed) = dataclasses.replace(STEP, errors=2, step_s=0.0).notes()
    assert failed.startswith("2 transfers failed: a tensor whose write fails stays in memory")
    (*_, unseen) = dataclasses.replace(STEP, unseen_bytes=3 * MIB).notes()
    assert unseen.startswith("3.0 MiB of results were in the cache of torch's selective checkpointing")


def test_a_notebook_shows_the_cells_of_the_table_escaped() -> None:
    stats = dataclasses.replace(TOTAL, kept_by_reason=MappingProxyType({"<b>&": MIB}))
    page = ElementTree.fromstring(f"<div>{stats._repr_html_()}</div>")
    rows = [[cell.text or "" for cell in row] for row in page.iter("tr")]
    verdict, *notes = [note.text or note[0].text for note in page.iter("p")]
    text = str(stats).splitlines()
    assert [verdict, *(" ".join(" ".join(row).split()) for row in rows), *notes] == [
        " ".join(line.split()) for line in text
    ]
    assert ["<b>&", "1.0 MiB", "<1%", "0", ""] in rows
    assert notes == stats.notes() != []


def test_asdict_is_what_json_gives_back() -> None:
    data = TOTAL.asdict()
    assert json.loads(json.dumps(data)) == data
    names = {field.name for field in dataclasses.fields(OffloadStats)}
    assert set(data) == names - {"situation"} | {"verdict"}
    assert data["kept_by_reason"] == {"below min_tensor_bytes": 50 * MIB}
    assert data["last_step"]["saved_bytes"] == 100 * MIB
    assert data["last_step"]["last_step"] is None
