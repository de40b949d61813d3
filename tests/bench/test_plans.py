"""The ablation's linear program makes plans that hold, and the replay's comparison is of transfer with transfer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks._plans.paces import at_paces, plan_at_pace
from benchmarks.replay import compare
from support.benchmarks import run_benchmark
from support.clock import DEAR_S, Counted
from support.plans import MIB, layers
from tba._plan import clock
from tba._plan.facts import Cap
from tba._plan.greedy import decide


@pytest.mark.parametrize("rate", [2e9, 2e8, 5e7])
@pytest.mark.parametrize("share", [0.4, 0.7])
def test_the_linear_program_fits_and_is_above_the_bound(rate: float, share: float) -> None:
    linear = pytest.importorskip("benchmarks._plans.linear", reason="scipy is not here", exc_type=ImportError)
    facts = layers(24, 16, rate=rate)
    budget = int(share * facts.saved_bytes)
    plan = linear.decide_linear(facts, budget)
    assert plan.fits
    assert plan.bound_s - 1e-9 <= plan.predicted.step_s <= 1.15 * decide(facts, budget).predicted.step_s


def test_the_linear_program_keeps_to_a_cap() -> None:
    linear = pytest.importorskip("benchmarks._plans.linear", reason="scipy is not here", exc_type=ImportError)
    facts = replace(layers(24, 16), cap=Cap(40 * MIB, "a small disk"))
    plan = linear.decide_linear(facts, 300 * MIB)
    assert plan.fits
    assert plan.recomputed
    assert plan.predicted.moved_bytes <= 40 * MIB


def test_the_large_case_is_as_large_as_it_says() -> None:
    cases = pytest.importorskip("benchmarks._plans.cases")
    facts = cases.large()
    assert len(facts.saved) == 10_032
    plan = decide(facts, int(0.5 * facts.saved_bytes))
    assert plan.fits
    assert plan.predicted.step_s - plan.bound_s <= 0.005 * facts.step_s


def test_transfers_are_compared_in_order_as_shares_of_the_step() -> None:
    simulated = [("write", 0.0, 1.0, 8), ("write", 1.0, 2.0, 8), ("read", 5.0, 6.0, 8)]
    late = [(kind, start + 1.0, end + 3.0, nbytes) for kind, start, end, nbytes in simulated[:2]]
    step = {"step_s": 10.0, "seen": late, "simulated": simulated}
    writes, reads = compare([step], "write"), compare([step], "read")
    assert (writes["seen"], writes["simulated"], writes["compared"]) == (2, 2, 2)
    assert writes["start"] == pytest.approx(0.1)
    assert writes["end"] == writes["most"] == pytest.approx(0.3)
    assert writes["within"] == 0.5
    assert (reads["seen"], reads["simulated"], reads["compared"]) == (0, 1, 0)


@pytest.mark.parametrize(("forward", "backward"), [(0.6, 0.6), (1.7, 1.7), (1.4, 0.9)])
def test_a_plan_is_simulated_at_the_paces_of_a_step(forward: float, backward: float) -> None:
    plan = decide(layers(12, 8, rate=2e8), 80 * MIB)
    real = plan.under(at_paces(plan.facts, forward, backward), plan.budget_bytes).predicted
    found = plan_at_pace(plan, real.turn_s, real.step_s).predicted
    assert (found.turn_s, found.step_s) == pytest.approx((real.turn_s, real.step_s), rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_real_step_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "current", Counted(DEAR_S))
    found = run_benchmark("replay", "--threads", "1", scratch=tmp_path)
    [kinds] = found["arms"].values()
    assert kinds["write"]["compared"] > 0
    assert kinds["read"]["compared"] > 0
    assert len(found["bars"]) == 2


@pytest.mark.slow
def test_the_ablation_decides_on_a_real_step(tmp_path: Path) -> None:
    pytest.importorskip("scipy", reason="scipy is not here")
    [rows] = run_benchmark("ablation", "--threads", "1", scratch=tmp_path)["cases"].values()
    assert len(rows) == 8
    assert all(row["plans"]["greedy"]["fits"] for row in rows)
    assert all(plan["gap"] >= -1e-9 for row in rows for plan in row["plans"].values() if plan["fits"])
