"""The ledger: bytes in memory by what holds them, and what each kind of budget leaves for more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tba._config import OffloadConfig
from tba._memory.ledger import Expected, Ledger, held_limit_bytes, read_limit_bytes
from tba._memory.limits import limits
from tba._memory.pressure import Pressure
from tba._plan.greedy import movable
from tba._plan.simulate import simulate
from tba._stats import Counters, Recorder

MIB = 1 << 20
CPU = torch.device("cpu")
LIMITS = limits(None, None, 1.0, 1 << 30)


def ledger(tier: str = "auto", **settings: Any) -> tuple[Ledger, Any, Counters]:
    """A ledger, the transfers that it looks at, and what it counts."""
    staging, counters = SimpleNamespace(bytes=0), Counters()
    config = OffloadConfig(tier=tier, **settings)
    pressure = Pressure(LIMITS.reserve_bytes)
    made = Ledger(config, LIMITS, pressure, staging, counters, Recorder(), lambda: None)
    return made, staging, counters


def test_all_that_is_in_memory_is_counted_once() -> None:
    made, staging, counters = ledger(memory_budget="10MiB")
    graph = torch.zeros(1)
    made.hold(4, 4, CPU)
    made.hold(6, 8, CPU)
    made.count_held(-4)
    staging.bytes = 4
    made.count_read_back(3)
    made.keep(graph, 2, shared=False)
    assert made.in_memory_bytes == 6 + 4 + 3 + 2
    assert counters.peak_bytes == 15
    made.note(twice_bytes=1)
    assert counters.peak_bytes == 15


def test_what_was_passed_counts_until_it_dies_and_a_leaf_no_longer_than_its_step() -> None:
    made, _, _ = ledger(memory_budget="10MiB")
    one, other, mask, batch = (torch.ones(3) for _ in range(4))
    made.keep(one, 10, shared=False)
    made.keep(other, 5, shared=False)
    made.keep(mask, 3, shared=True)
    made.keep(batch, 2, shared=True)
    assert made.passed_bytes == 20
    del one, mask
    assert (made.passed_bytes, made.graphs_live) == (7, True)
    made.end_step()
    assert made.passed_bytes == 5
    del batch
    assert made.passed_bytes == 5
    del other
    assert (made.passed_bytes, made.graphs_live) == (0, False)


def test_of_a_set_budget_the_largest_tensor_and_a_trial_are_left_free() -> None:
    made, _, _ = ledger(memory_budget="10MiB")
    assert made.look_at_room() == made.limit_bytes == 10 * MIB
    made.hold(MIB, 2 * MIB, CPU)
    assert made.limit_bytes == 8 * MIB
    made.expect(Expected(trial_bytes=3 * MIB))
    assert made.limit_bytes == 5 * MIB
    made.expect(Expected(largest_bytes=MIB))  # by plan; but this step has saved a larger one
    assert made.limit_bytes == 8 * MIB
    made.end_step()
    assert made.limit_bytes == 9 * MIB
    made.expect(Expected(largest_bytes=20 * MIB))
    assert made.limit_bytes == 0


def test_reads_leave_room_for_what_is_held_kept_in_flight_and_replayed() -> None:
    made, staging, _ = ledger(memory_budget="40MiB", prefetch_bytes="64MiB")
    made.look_at_room()
    made.sent(10 * MIB)
    graph = torch.zeros(1)
    made.keep(graph, 2 * MIB, shared=False)
    made.hold(3 * MIB, 3 * MIB, CPU)
    staging.bytes = 4 * MIB
    made.expect(Expected(replay_bytes=5 * MIB))
    made.expect(Expected(replay_bytes=MIB))  # another kind of forward in one step
    assert made.read_bytes == min(40 - 3 - 2 - 3 - 4 - 5, made.read_ahead_bytes // MIB) * MIB
    made.forget_replays()
    assert made.expected.replay_bytes == 0


def test_what_cannot_be_sent_leaves_less_to_hold_under_a_set_budget() -> None:
    made, staging, _ = ledger(memory_budget="10MiB")
    made.look_at_room()
    made.hold(MIB, MIB, CPU)
    made.count_read_back(2 * MIB)
    staging.bytes = 3 * MIB
    assert made.hold_bytes == (9 - 2) * MIB
    assert made.over_bytes == (1 + 3 - 7) * MIB
    assert made.has_room(3 * MIB)
    assert not made.has_room(3 * MIB + 1)


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
def test_other_tiers_share_a_window_that_grows_with_what_is_sent(tier: str) -> None:
    made, _, _ = ledger(tier)
    before = made.window_bytes
    assert made.limit_bytes == before
    made.sent(before)
    made.sent(1)
    assert made.limit_bytes == made.window_bytes > before
    made.hold(made.window_bytes - MIB, MIB, CPU)
    assert made.read_bytes == MIB
    assert made.over_bytes == -MIB


def test_the_peak_of_a_step_is_looked_for_anew() -> None:
    made, _, counters = ledger(memory_budget="10MiB")
    made.hold(5, 5, CPU)
    made.count_held(-5)
    made.watch_peak()
    made.hold(3, 3, CPU)
    assert (made.watched_peak_bytes, counters.peak_bytes) == (3, 5)


def test_the_budget_of_plans_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who changes the formula changes it for both."""
    asked = []

    def held(budget_bytes: int, largest_bytes: int, trial_bytes: int = 0) -> int:
        asked.append((budget_bytes, largest_bytes, trial_bytes))
        return held_limit_bytes(budget_bytes, largest_bytes, trial_bytes)

    from support.plans import layers

    facts = layers(4, 2)
    for place in ("_memory.ledger", "_plan.greedy", "_plan.simulate"):
        monkeypatch.setattr(f"tba.{place}.held_limit_bytes", held)
    made, _, _ = ledger(memory_budget="10MiB")
    made.look_at_room()
    made.hold(facts.largest_bytes, facts.largest_bytes, CPU)
    assert made.limit_bytes == 8 * MIB
    simulate(facts, (), (), 10 * MIB)
    movable(facts, frozenset(), 10 * MIB)
    assert asked == [(10 * MIB, facts.largest_bytes, 0)] * 3
    assert read_limit_bytes(8, 1, 2, 3) == 2
