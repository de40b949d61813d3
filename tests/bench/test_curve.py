"""Tests of the benchmark of curves: its sets of arms end to end, and what a curve and a budget are held to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks._peers.registry import PEERS
from benchmarks._processes.device import CPU, CUDA
from benchmarks._report.curve import best_within, curve_bars, plan_bars, time_bars
from benchmarks._report.results import RESULTS
from benchmarks._report.steps import Measured
from benchmarks._workload.families import FAMILIES
from benchmarks.curve import PLAIN, SETS, Arm, Set, make_specs, points
from support.benchmarks import run_benchmark

FREE = 0.5  # of what plain saves: a budget


def measured(name: str, peak_bytes: int, *wall_s: float, **moved: float) -> Measured:
    about = {"units": 10, "unit": "tokens"}
    return Measured(
        name=name, allocator="none", about=about, peak_bytes=peak_bytes, wall_s=list(wall_s), moved=dict(moved)
    )


def run_curve(tmp_path: Path, *options: str) -> Mapping[str, Any]:
    """Run the benchmark in its smallest form; return what it found of its one family and batch."""
    found = run_benchmark("curve", "--threads", "1", "--out", str(tmp_path / "out"), *options, scratch=tmp_path)
    [picture] = map(Path, found["files"])
    assert picture.stat().st_size > 1000
    [batches] = found["families"].values()
    [curve] = batches.values()
    assert curve["gradients_bit_equal"] is True
    return dict(curve)


@pytest.mark.exhaustive
def test_curve_places_every_arm_and_draws(tmp_path: Path) -> None:
    curve = run_curve(tmp_path)
    arms = curve["arms"]
    assert arms.keys() == set(SETS["rok"].few) - {"save_on_cpu"}  # which tells nothing of peaks
    assert arms["nvme"]["moved"]["written_bytes"] > 0
    assert arms["keep, safe8"]["moved"]["packed_bytes"] < arms["keep, safe8"]["moved"]["encoded_bytes"]
    assert arms["keep, safe8"]["about"]["inexact"] is True
    peers = [bar["what"].partition(" / ")[2].removesuffix(", at no higher peak") for bar in curve["bars"]]
    assert peers[:2] == ["plain", "checkpoint"]


@pytest.mark.exhaustive
def test_a_budget_is_kept_and_nothing_moves_where_all_fits(tmp_path: Path) -> None:
    curve = run_curve(tmp_path, "--arms", "auto")
    planned = curve["arms"]["auto 0.40"]["moved"]
    assert planned["held_bytes_by_plan"] <= planned["budget_bytes"] < curve["saved_bytes"]
    assert planned["moved_share"] + planned["recomputed"] > 0
    bars = {bar["what"]: bar for bar in curve["bars"]}
    assert bars["gpt, batch 2: auto 1.10, which fits: moved"]["met"] is True
    assert bars["gpt, batch 2: auto 0.40: held / budget"]["met"] is True


@pytest.mark.exhaustive
def test_the_papers_arms_have_either_window(tmp_path: Path) -> None:
    arms = run_curve(tmp_path, "--arms", "paper")["arms"]
    assert arms.keys() == {"plain", "nvme", "nvme, 14% held back"}
    assert arms["nvme"]["moved"]["read_bytes"] > 0


@pytest.mark.exhaustive
def test_a_slow_link_is_waited_for(tmp_path: Path) -> None:
    arms = run_curve(tmp_path, "--arms", "links")["arms"]
    slow, free = arms["nvme, 50 MB/s"], arms["nvme"]
    assert slow["stalled_share"][0] >= slow["waited_share"][0] > 0
    assert min(slow["moved"]["read_bytes"], free["moved"]["read_bytes"]) > 0


@pytest.mark.exhaustive
def test_arms_of_one_process_are_timed_and_told_nothing_of_peaks(tmp_path: Path) -> None:
    options = ("--together", "--arm", "nvme", "--arm", "checkpoint", "--arm", "save_on_cpu", "--budget", "0.3")
    found = run_benchmark("curve", "--threads", "1", *options, scratch=tmp_path)
    assert found["files"] == []
    curve = found["families"]["gpt"]["2"]
    arms = curve["arms"]
    assert arms.keys() == {"plain", "checkpoint", "save_on_cpu", "nvme", "auto 0.30"}
    assert curve["gradients_bit_equal"] is True
    assert all(len(arm["wall_s"]) == 1 for arm in arms.values())
    assert [name for name, arm in arms.items() if arm["moved"]] == ["nvme", "auto 0.30"]
    assert arms["nvme"]["moved"]["written_bytes"] > 0
    assert not any("peak" in bar["what"] for bar in curve["bars"])


@pytest.mark.exhaustive
def test_a_compiled_model_moves_by_a_budget_beside_pytorchs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TBA_DERIVE", "0")  # whether it moves or recomputes else depends on what both cost here
    curve = run_curve(tmp_path, "--arms", "compiled")
    arms = curve["arms"]
    assert arms.keys() == {"plain", "nvme", "activation_memory_budget 0.4", "auto 0.40"}
    assert arms["nvme"]["moved"]["written_bytes"] > arms["auto 0.40"]["moved"]["written_bytes"] > 0
    bars = {bar["what"]: bar for bar in curve["bars"]}
    assert bars["gpt, batch 2: auto 0.40: held / budget"]["met"] is True


def test_arms_of_a_card() -> None:
    specs = make_specs(SETS["card"], {"family": "llama"}, 1000, 2, CUDA)
    assert {"cpu", "auto 0.25"} <= {spec.name for spec in specs}
    for spec in specs:
        assert spec.role == "family:FamilyArm"
        assert {"device": "cuda", "dtype": "bfloat16", "size": "large"}.items() <= spec.options.items()
        assert "CUBLAS_WORKSPACE_CONFIG" in spec.environment
    assert (CPU.theme("rok"), CUDA.theme("rok")) == ("rok", "rok-cuda")


@pytest.mark.parametrize("name", SETS)
def test_a_set_names_what_there_is(name: str) -> None:
    chosen = SETS[name]
    names = [arm.name for arm in chosen.arms]
    assert names[0] == PLAIN
    assert len(set(names)) == len(names)
    assert {*chosen.few} <= {*names}
    assert {*chosen.families} <= FAMILIES.keys()
    assert {arm.peer for arm in chosen.arms} - {""} <= PEERS.keys()


def test_an_arm_is_made_of_its_data() -> None:
    arms = [
        Arm(name="budget", tier="auto", shares={"memory_budget": FREE}),
        Arm(name="peer", peer="checkpoint"),
        Arm(name="slow", tier="nvme", settings={"compress": "exact"}, rate_bytes_per_s=1e6, one_batch=True),
        Arm(name="other's", families=("bert",)),
    ]
    chosen = Set(arms=arms, few=(), settings={"min_tensor_bytes": 0}).limited(2e6)
    options = {spec.name: spec.options for spec in make_specs(chosen, {"family": "gpt"}, 1000, 1)}
    assert options.keys() == {"budget", "peer", "slow"}
    limits = {"max_write_rate": 2e6, "max_read_rate": 2e6}
    assert options["budget"]["settings"] == {"min_tensor_bytes": 0, "memory_budget": 500, **limits}
    assert options["peer"]["peer"] == "checkpoint"
    assert "settings" not in options["peer"]
    own = {"max_write_rate": 1e6, "max_read_rate": 1e6, "compress": "exact"}
    assert options["slow"]["settings"] == {"min_tensor_bytes": 0, **own}
    assert [spec.name for spec in make_specs(chosen, {"family": "gpt"}, 1000, 1, every=False)] == ["budget", "peer"]


def test_points_are_shares_of_plain_and_tell_whose_an_arm_is() -> None:
    lossy = replace(measured("safe8", 30, 4.0, written_bytes=1), about={"inexact": True})
    auto = (measured(name, 40, 2.0, written_bytes=1) for name in ("auto 0.40", "auto 0.40, 50 MB/s"))
    arms = {arm.name: arm for arm in (measured(PLAIN, 100, 1.0), measured("checkpoint", 50, 2.0), *auto, lossy)}
    assert [tuple(point) for point in points(arms)] == [
        ("plain", "plain", 1.0, 1.0),
        ("checkpoint", "peer", 0.5, 0.5),
        ("auto 0.40", "auto", 0.4, 0.5),
        ("auto 0.40, 50 MB/s", "ours", 0.4, 0.5),
        ("safe8", "lossy", 0.3, 0.25),
    ]


def test_a_curve_names_what_lies_above_or_left() -> None:
    plain, fast = measured("plain", 100, 1.0, 1.0, 1.0), measured("fast", 60, 1.0, 1.01, 1.0)
    low, slow = measured("low", 40, 2.0, 2.0, 2.0), measured("slow", 40, 3.0, 3.1, 2.9)
    lowest = measured("lowest", 10, 9.0, 9.0, 9.0)
    assert best_within(plain, [low, fast]) is fast
    assert best_within(slow, [low, fast]) is low
    assert best_within(lowest, [low, fast]) is None
    arms = {arm.name: arm for arm in (plain, fast, low, slow, lowest)}
    found = curve_bars("here", arms, ["plain", "slow", "lowest"], ["low", "fast"])
    assert [bar.met for bar in found] == [True, True, False]
    assert [bar.measured for bar in found] == [1.0, 1.5, 4.0]
    [beaten] = curve_bars("here", arms, ["fast"], ["low"])
    assert beaten.what == "here: throughput of low / fast, at no higher peak"
    assert beaten.met is False


def test_times_of_one_process_are_held_to_what_a_budget_may_cost() -> None:
    plain, fits = measured("plain", 1, 1.0, 1.0), measured("auto 1.10", 1, 1.004, 1.004)
    plain.cpu_s, fits.cpu_s = [2.0, 2.0], [2.02, 2.02]
    arms = {arm.name: arm for arm in (plain, fits, measured("auto 0.70", 1, 1.04, 1.04), measured("nvme", 1, 2.0, 2.0))}
    found = {bar.what: bar.met for bar in time_bars("here", arms, plain, "auto 1.10", "bare")}
    assert found == {
        "here: wall seconds of auto 1.10 / plain": True,
        "here: CPU seconds of auto 1.10 / plain": False,
        "here: throughput of auto 0.70 / plain": True,
    }
    assert time_bars("here", {"plain": plain}, plain, "auto 1.10", "bare") == []


def test_hooks_that_do_nothing_are_told_beside_a_budget_that_fits() -> None:
    plain, bare, fits = (measured(name, 1, wall_s) for name, wall_s in (("plain", 1.0), ("bare", 2.0), ("fits", 3.0)))
    for arm in (plain, bare, fits):
        arm.cpu_s = arm.wall_s
    found = time_bars("here", {arm.name: arm for arm in (plain, bare, fits)}, plain, "fits", "bare")
    assert [(bar.what.removeprefix("here: "), bar.measured, bar.limit) for bar in found[::2]] == [
        ("wall seconds of fits / plain", 3.0, 1.005),
        ("wall seconds of bare / plain", 2.0, None),
        ("wall seconds of fits / bare", 1.5, None),
    ]


def test_a_plan_is_held_to_its_budget_and_its_prediction() -> None:
    moved = {"held_bytes_by_plan": 110.0, "budget_bytes": 100.0, "predicted_peak": 0.96, "predicted_step": 1.2}
    assert [bar.met for bar in plan_bars("auto", moved)] == [False, True, False]
    assert plan_bars("nvme", {"written_bytes": 1.0}) == []


def test_filed_results_of_removed_benchmarks_name_the_commit_that_runs_them() -> None:
    removed = dict.fromkeys(("ablation", "fidelity", "knee", "replay", "sim"), "6fb1fb9")
    for name, commit in {**removed, "bert": "1b95230", "step-explain": "1b95230"}.items():
        [page] = RESULTS.glob(f"{name}_*.md")
        assert f"to run it again, check out {commit}" in " ".join(page.read_text().split())
        command = json.loads(page.with_suffix(".json").read_text())["command"]
        assert command.startswith(f"python -m benchmarks {name.partition('-')[0]}")
