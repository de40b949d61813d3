"""Forecasts: memory that a training needs, what is planned with the rest, errors with their numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.forecast import FAMILIES, LEAST_BYTES
from tba._forecast.forecast import Forecast, forecast
from tba._forecast.group import Group
from tba._forecast.hardware import DEVICES, DISKS, Device, Disk, device_named, disk_named
from tba._forecast.observe import Observed, observe
from tba._forecast.report import report as report_together
from tba._forecast.together import Alike, Together

pytest.importorskip("transformers")

CARD = DEVICES["h100"]
GEN5 = disk_named("gen5x1")


@pytest.fixture(scope="module")
def seen() -> Observed:
    return observe(FAMILIES["llama"], CARD, min_tensor_bytes=LEAST_BYTES)


def report(found: Forecast) -> str:
    """Format the forecast of one rank."""
    return report_together(Together(Group(), (Alike((0,), found),)))


def saved_bytes(seen: Observed) -> int:
    return sum(each.nbytes for each in seen.saved)


def tight(seen: Observed, share: float, *, replays: bool = True, disk: Disk | None = GEN5) -> Forecast:
    """Plan with a share of what is saved."""
    if not replays:
        seen = replace(seen, blocks=tuple(replace(block, replay_s=None) for block in seen.blocks))
    return forecast(seen, CARD, disk, budget_bytes=int(share * saved_bytes(seen)))


def test_a_run_that_fits_moves_nothing_and_writes_nothing(seen: Observed) -> None:
    found = forecast(seen, CARD, GEN5)
    assert found.plan.idle
    assert found.years is None
    assert found.written_bytes_per_day == 0
    assert "no writes" in report(found)
    assert found.ways["auto"].predicted.step_s == found.ways["plain"].predicted.step_s


def test_a_plan_that_must_move_says_what_it_writes_and_how_long_the_ssd_lives(seen: Observed) -> None:
    found = tight(seen, 0.6, replays=False)
    moved = found.plan.predicted.moved_bytes
    assert moved >= 0.4 * saved_bytes(seen)
    per_day = moved / (found.plan.predicted.step_s + found.training.optimizer_s) * 86400
    assert found.written_bytes_per_day == pytest.approx(per_day)
    assert GEN5 is not None
    assert found.years == pytest.approx(GEN5.endurance_bytes / per_day / 365)
    assert f"{per_day / 1e12:.1f} TB a day" in report(found)
    four = tight(seen, 0.6, replays=False, disk=disk_named("gen5x4"))
    assert four.plan.predicted.step_s <= found.plan.predicted.step_s


def test_without_a_disk_blocks_recompute(seen: Observed) -> None:
    found = tight(seen, 0.7, disk=None)
    assert found.plan.recomputed
    assert not found.plan.sends
    assert "nvme" not in found.ways
    assert "writes" not in report(found)
    assert "cannot be met" in tight(seen, 0.7, disk=None, replays=False).problem


def test_a_card_that_was_never_compared_says_so(seen: Observed) -> None:
    assert "No step on" not in report(forecast(seen, CARD, GEN5))
    other = DEVICES["rtx4090"]
    assert "No forecast for rtx4090 was compared" in report(forecast(seen, other, GEN5))


def test_the_ways_are_in_order(seen: Observed) -> None:
    found = tight(seen, 0.7)
    kept, planned, full = (found.step_s(found.ways[name]) for name in ("plain", "auto", "checkpointing"))
    assert kept < planned <= full
    assert found.fits(found.ways["plain"])  # the card has room; the user's budget has not
    assert not replace(found, device=small(found.peak_bytes(found.ways["plain"]) - 1)).ways["plain"].fits


@pytest.mark.parametrize(
    ("optimizer", "per_weight"), [("adamw", 2.0), ("adamw-fp32", 2.0), ("adamw-master", 3.0), ("sgd", 0.0)]
)
def test_states_of_float32_weights(seen: Observed, optimizer: str, per_weight: float) -> None:
    found = forecast(seen, CARD, GEN5, optimizer=optimizer)
    assert found.training.states == per_weight * 4 * seen.trained
    assert found.training.gradients == 4 * seen.trained
    assert found.training.weights == seen.weight_bytes >= 4 * seen.trained
    assert found.plan.budget_bytes == CARD.memory_bytes - found.training.always - seen.other_bytes


def test_states_of_bfloat16_weights() -> None:
    def half() -> tuple[nn.Module, Any]:
        return nn.Linear(8, 8, dtype=torch.bfloat16), torch.randn(4, 8, dtype=torch.bfloat16)

    seen = observe(half, CARD)
    states = {name: forecast(seen, CARD, None, optimizer=name).training.states for name in ("adamw", "adamw-master")}
    assert states == {"adamw": 4 * seen.trained, "adamw-master": 12 * seen.trained}


def test_shards_share_what_is_always_there_and_gather_blocks(seen: Observed) -> None:
    one, four = forecast(seen, CARD, GEN5), forecast(seen, CARD, GEN5, shards=4)
    assert four.training.always == pytest.approx(one.training.always / 4, abs=4)
    assert four.training.gathered == 3 * seen.block_weight_bytes + 2 * seen.outside_weight_bytes > 0
    assert four.training.work == one.training.work


def test_ranks_of_a_node_share_its_disk_and_wear_it_out_together(seen: Observed) -> None:
    assert GEN5 is not None
    rates = {"write_bytes_per_s": GEN5.write_bytes_per_s / 4, "read_bytes_per_s": GEN5.read_bytes_per_s / 4}
    one, four = (tight(seen, 0.6, replays=False, disk=each) for each in (replace(GEN5, **rates), GEN5.shared(4)))
    assert four.plan.predicted == one.plan.predicted
    assert four.written_bytes_per_day == pytest.approx(4 * one.written_bytes_per_day)
    assert four.years == pytest.approx(one.years / 4)  # type: ignore[operator]
    assert "gen5x1 for 4 ranks" in report(four)


def small(memory_bytes: int) -> Device:
    return replace(CARD, name="small", memory_bytes=memory_bytes)


def test_a_budget_that_no_plan_meets_is_refused_with_the_least_that_would_do(seen: Observed) -> None:
    assert re.search(r"cannot be met: .* Set it to [\d.]+ \w+ or more", tight(seen, 0.01).problem)


def test_a_card_that_no_plan_fits_says_how_much_is_missing(seen: Observed) -> None:
    full = forecast(seen, CARD, None)
    found = forecast(seen, small(full.peak_bytes(full.ways["checkpointing"]) - (1 << 16)), None)
    assert re.match(r"of [\d.]+ MiB that a step saves, the best plan keeps .* more than small has left", found.problem)
    assert report(found).splitlines()[1] == f"DOES NOT FIT: {found.problem}"


def test_the_optimizer_may_bind(seen: Observed) -> None:
    heavy = replace(seen, trained_bytes=1 << 34, weight_bytes=1 << 34, trained=1 << 32)
    found = forecast(heavy, small(90 << 30), GEN5)
    assert found.binds() == "in the optimizer"
    assert found.peak_bytes(found.plan) == 5 << 34
    assert forecast(seen, CARD, GEN5).binds() != "in the optimizer"


def test_the_table_is_whole() -> None:
    for device in DEVICES.values():
        assert device.source
        assert device.like_cuda
        assert device.flops_per_s[torch.bfloat16] >= device.flops_per_s[None] > 1e12
        assert 6e9 < device.memory_bytes < 1e12
        assert device_named(device.name.upper()) is device
    for disk in DISKS.values():
        three = disk_named(f"{disk.name}x3")
        assert three is not None
        assert (three.write_bytes_per_s, three.endurance_bytes) == (
            3 * disk.write_bytes_per_s,
            3 * (disk.endurance_bytes or 0),
        )
        assert disk.source


def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "forecast.md").read_text()
    for device in DEVICES.values():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{device.name}` "))
        assert device.source.partition(";")[0] in row
        assert f" {device.memory_bytes / 1e9:.0f} GB " in row
    for disk in DISKS.values():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{disk.name}xN` "))
        assert disk.source in row
        assert f" {(disk.endurance_bytes or 0) / 1e12:,.0f} TB " in row


def test_all_figures_are_in_the_dict(seen: Observed) -> None:
    found = json.loads(json.dumps(tight(seen, 0.7).to_dict()))
    nbytes = found["saved_bytes"]
    assert (
        nbytes["all"] - nbytes["small"] == nbytes["kept"] + nbytes["moved"] + nbytes["recomputed"] == saved_bytes(seen)
    )
    assert found["memory_bytes"]["peak"] < found["memory_bytes"]["card"]
    assert found["steps"]["auto"]["fits"]
    assert found["fits"]
