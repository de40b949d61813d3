"""What the planner takes the link for, given what a step's transfers have shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.plans import layers
from tba._auto.pace import Pace, without_hooks
from tba._config import OffloadConfig
from tba._plan import clock
from tba._plan.clock import Clock
from tba._transfer.cost import Cost, Way

MB = 10**6


def pace(out: Way, back: Way, **settings: Any) -> Pace:
    return Pace(OffloadConfig(tier="auto", **settings), Cost(out=out, back=back), 1)


@pytest.mark.parametrize(("limit", "seen", "taken_for"), [("100MB", 0.1, 100), ("100MB", 1.0, 40), (None, 0.1, 400)])
def test_a_link_is_not_faster_than_its_limit(limit: str | None, seen: float, taken_for: int) -> None:
    """Forty MB in so many seconds: a limit lets the first bytes after a rest through at once."""
    way = Way(nbytes=40 * MB, busy_s=seen)
    link = pace(way, way, max_write_rate=limit, max_read_rate=limit).learn(planned=False, on_device=False)
    assert link.write_bytes_per_s == link.read_bytes_per_s == taken_for * MB


def test_a_limited_link_that_has_carried_too_little_is_as_fast_as_its_limit() -> None:
    link = pace(Way(), Way(), max_write_rate="100MB").learn(planned=False, on_device=False)
    assert (link.write_bytes_per_s, link.read_bytes_per_s) == (100 * MB, 1000 * MB)


def test_hooks_of_a_record_cost_the_cpu_time_they_took_beside_deriving(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 10.0
    monkeypatch.setattr("tba._transfer.cost.time", SimpleNamespace(thread_time=lambda: now_s))
    monkeypatch.setattr(clock, "current", Clock())
    cost = Cost()
    pace = Pace(OffloadConfig(tier="auto"), cost, 1)
    for records in (1, 0):  # pack, and unpack
        begun = cost.begin_work()
        now_s += 3.0
        cost.wait(4.0)  # which takes no CPU time
        cost.leave_out(2.0)
        cost.work(begun, records)
    assert (cost.hooks_s, cost.records, cost.waited_s) == (2.0, 1, 8.0)
    assert pace.learn(planned=False, on_device=False).step_s_per_record == 2.0
    cost.end_step()
    assert (cost.hooks_s, cost.records) == (0.0, 0)
    assert pace.learn(planned=True, on_device=False).step_s_per_record == 2.0  # a step without records tells nothing


def test_a_watched_step_counts_without_what_its_hooks_took() -> None:
    facts = layers(4, 4)
    found = without_hooks(facts, facts.step_s / 4)
    assert found.step_s == pytest.approx(0.75 * facts.step_s)
    assert [each.replay_s for each in found.blocks] == [each.replay_s for each in facts.blocks]  # tried apart
    assert without_hooks(facts, 0.0) is facts
    assert without_hooks(facts, 2 * facts.step_s).step_s > 0
