"""What a plan tells: its table, its picture, and the paper's rule beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from support.plans import MIB, layers
from tba import ConfigError
from tba._plan.greedy import decide
from tba._plan.plan import Measured
from tba._plan.prefix import prefix


def test_predicted_and_measured_stand_side_by_side() -> None:
    plan = decide(layers(12, 8, rate=2e8), 80 * MIB)
    text = str(replace(plan, measured=Measured(1.5, 79 * MIB)))
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "80.0 MiB" in lines["budget"]
    assert "79.0 MiB" in lines["peak, measured"]
    assert "1.500 s" in lines["step, measured"]
    assert f"{plan.bound_s:.3f} s" in text


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_drawn(tmp_path: Path, ending: str) -> None:
    target = tmp_path / f"plan.{ending}"
    plan = decide(layers(12, 8, rate=2e8), 80 * MIB)
    replace(plan, measured=Measured(1.5, 79 * MIB)).picture(target)
    assert target.stat().st_size > 5000


def test_a_picture_of_no_kind_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must end in"):
        decide(layers(4, 4), 10 * MIB).picture(tmp_path / "plan.txt")


@pytest.mark.parametrize(("rate", "blocks"), [(1e12, 12), (1.0, 0)])
def test_the_papers_rule_moves_all_or_nothing_at_the_ends(rate: float, blocks: int) -> None:
    plan = prefix(layers(12, 8, rate=rate), 0)
    assert len({place.block for place in plan.sends}) == blocks


def test_the_papers_rule_moves_a_prefix_that_the_link_carries() -> None:
    facts = layers(12, 8, rate=1e8)
    plan = prefix(facts, 0)
    moved = sorted({place.block for place in plan.sends})
    assert moved == list(range(len(moved)))
    assert 0 < len(moved) < 12
    assert sum(plan.sends.values()) <= 1e8 * 3 * facts.forward_s
    assert not plan.recomputed


def test_prices_are_what_plans_with_more_would_take() -> None:
    plan = decide(layers(12, 8, rate=1e8), 60 * MIB)
    prices = plan.prices
    assert prices["1 GiB more memory"] == pytest.approx(plan.predicted.step_s - plan.facts.step_s)
    assert 0 < prices["1 GB/s more disk"] < prices["1 GiB more memory"]
    text = str(plan)
    assert f"1 GB/s more disk would save  {prices['1 GB/s more disk']:.3f} s" in re.sub(" {2,}", "  ", text)
    assert len(text.splitlines()) < 20


def test_what_has_no_use_for_more_has_no_price() -> None:
    facts = layers(4, 4)
    assert decide(facts, 1 << 30).prices == {}
    assert prefix(facts, 0).prices == {}
