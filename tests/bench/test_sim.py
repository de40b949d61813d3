"""The simulation of hardware that is not here: repeated layers are those of a full model, and shares keep to limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.clock import DEAR_S, Counted
from support.plans import MIB, layers
from tba._forecast.observe import Observed, observe
from tba._plan import clock

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks._plans.leaving import Leaving, room_bytes
from benchmarks._plans.machines import DRIVES, HOST, MACHINES, linked
from benchmarks._plans.models import MODELS, Model, observed
from support.benchmarks import run_benchmark

CARD = MACHINES["h100"]
SMALL = Model("small", 256, 512, 7, 4, 2)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def pair(request: pytest.FixtureRequest) -> tuple[Observed, Observed]:
    """A model observed whole, and from three layers."""
    model = replace(SMALL, tied=request.param, sequences=2)
    return observe(model.subject, CARD.device), observed(model, CARD.device)


def test_repeated_layers_save_what_the_full_model_saves(pair: tuple[Observed, Observed]) -> None:
    full, found = pair
    assert len(full.blocks) == SMALL.layers
    assert [(each.place, each.nbytes) for each in found.saved] == [(each.place, each.nbytes) for each in full.saved]
    for name in ("saved_s", "wanted_s"):
        times = [getattr(each, name) for each in full.saved]
        assert [getattr(each, name) for each in found.saved] == pytest.approx(times, rel=1e-9, abs=1e-15), name
    for mine, whole in zip(found.blocks, full.blocks, strict=True):
        assert (mine.begin_s, mine.replay_s) == pytest.approx((whole.begin_s, whole.replay_s))
        assert mine.input_bytes == whole.input_bytes


def test_repeated_layers_weigh_and_take_what_the_full_model_does(pair: tuple[Observed, Observed]) -> None:
    full, found = pair
    exact = ("weight_bytes", "trained_bytes", "trained", "block_weight_bytes", "other_bytes", "flops", "tokens")
    assert {name: getattr(found, name) for name in exact} == {name: getattr(full, name) for name in exact}
    assert (found.forward_s, found.backward_s) == pytest.approx((full.forward_s, full.backward_s))


def test_repeated_layers_simulate_as_the_full_model(pair: tuple[Observed, Observed]) -> None:
    whole, mine = (Leaving(CARD.facts(each, 2)).plan(0.5).predicted for each in pair)
    assert mine.moved_bytes == whole.moved_bytes > 0
    assert mine.peak.nbytes == whole.peak.nbytes
    assert mine.step_s == pytest.approx(whole.step_s)


@pytest.mark.parametrize("rate", [2e9, 2e8])
def test_what_leaves_keeps_to_the_slowdown_and_more_does_not(rate: float) -> None:
    facts = layers(24, 16, rate=rate)
    leaving = Leaving(facts)
    moved = []
    for slowdown in (1.01, 1.02, 1.03):
        plan = leaving.most(slowdown)
        assert plan.predicted.step_s <= slowdown * facts.step_s
        assert not plan.recomputed
        more = leaving.plan(plan.predicted.moved_bytes / facts.saved_bytes + 0.1)
        assert more.predicted.moved_bytes > plan.predicted.moved_bytes
        assert more.predicted.step_s > slowdown * facts.step_s
        moved.append(plan.predicted.moved_bytes)
    assert moved == sorted(set(moved))


def test_the_least_that_leaves_fits_and_less_does_not() -> None:
    facts = layers(24, 16, rate=2e9)
    leaving = Leaving(facts)
    room = facts.saved_bytes // 2 + facts.largest_bytes
    plan = leaving.least(room)
    assert plan is not None
    assert plan.predicted.moved_bytes > 0
    assert plan.predicted.peak.nbytes <= room - facts.largest_bytes
    share = plan.predicted.moved_bytes / facts.saved_bytes
    assert leaving.plan(share - 0.1).predicted.peak.nbytes > room - facts.largest_bytes
    everything = leaving.least(2 * facts.saved_bytes)
    assert everything is not None
    assert everything.idle
    assert leaving.least(MIB) is None


def test_more_drives_and_faster_links_carry_more() -> None:
    seen = observed(SMALL, CARD.device)
    rates = [CARD.facts(seen, drives).link.write_bytes_per_s for drives in (*DRIVES, HOST)]
    assert rates == sorted(rates)
    assert rates[-1] == CARD.device.link_bytes_per_s
    links = [machine.facts(seen, HOST).link.write_bytes_per_s for machine in linked()]
    assert links == sorted(set(links))
    assert linked()[2].device == CARD.device


def test_what_more_cards_share_leaves_more_room() -> None:
    seen = observed(MODELS["70B"], CARD.device)
    rooms = [room_bytes(seen, CARD.device, "adamw-master", shards) for shards in (8, 64, 1024)]
    assert rooms[0] is None
    assert rooms[1] is not None
    assert rooms[2] is not None
    assert 0 < rooms[1] < rooms[2] < CARD.device.memory_bytes


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_simulation_says_that_it_is_one_beside_a_real_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "current", Counted(DEAR_S))
    found = run_benchmark("sim", "--threads", "1", "--out", str(tmp_path), scratch=tmp_path)
    assert found["simulated"] is True
    assert "no drive" in found["environment"]["SIMULATION"]
    [card] = found["rows"]["cards"]
    assert card["leaves"].keys() == {"1", "2", "4", "8", "host"}
    assert all(0 < each["share"] < 1 and each["slowdown"] <= 1.02 for each in card["leaves"].values())
    [check] = found["check"]["arms"].values()
    assert check["simulated_s"] > 0
    assert check["measured_s"] > 0
    assert check["measured_bytes"] > 0
    assert (tmp_path / "sim.png").stat().st_size > 0
