"""The ledger: bytes in memory by what holds them, and what each kind of budget leaves for more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tba._config import OffloadConfig
from tba._device import memory as device_memory
from tba._memory.ledger import Expected, Ledger, held_limit_bytes, read_limit_bytes
from tba._memory.limits import limits
from tba._memory.pressure import Pressure
from tba._plan.greedy import movable
from tba._plan.simulate import simulate
from tba._stats import Counters, Recorder

MIB = 1 << 20
GIB = 1 << 30
TOTAL = 64 * GIB
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
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


def test_what_a_block_that_runs_again_keeps_without_a_record_counts_as_long_as_its_graph_lives() -> None:
    made, _, counters = ledger(memory_budget="10MiB")
    graph = torch.ones(3)
    made.recompute(graph, 10, small_bytes=4)
    assert (made.in_memory_bytes, made.plain_bytes, counters.peak_bytes) == (4, 10, 4)
    assert made.hold_bytes == made.limit_bytes - 4
    del graph
    assert (made.in_memory_bytes, made.plain_bytes) == (0, 0)


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


class Device:
    """Statistics of a device of 64 GiB, of which weights take 8."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.active = self.peak = 8 * GIB
        self.looks = 0
        monkeypatch.setattr(device_memory, "figures", self.figures)
        monkeypatch.setattr(device_memory, "total_bytes", lambda device: TOTAL)

    def figures(self, device: torch.device) -> device_memory.Figures:
        self.looks += 1
        return device_memory.Figures(TOTAL - self.active, self.active, self.peak)

    def use(self, nbytes: int) -> None:
        self.active += nbytes
        self.peak = max(self.peak, self.active)


def step(made: Ledger, device: Device, layers: int, transient_bytes: int) -> int:
    """A step that saves a GiB a layer and takes more at the turn; returns the room that it saw."""
    for _ in range(layers):
        device.use(GIB)
        made.hold(GIB, GIB, CUDA)
    device.use(transient_bytes)
    device.use(-transient_bytes)
    room = made.look_at_room()
    made.count_held(-layers * GIB)
    device.use(-layers * GIB)
    made.end_step()
    return room


def test_what_a_step_takes_beside_saved_tensors_is_left_free_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    made, _, _ = ledger()
    beside = 8 * GIB + LIMITS.staging_bytes + LIMITS.window_bytes
    assert step(made, device, 8, 20 * GIB) == TOTAL - TOTAL // 16 - beside
    assert step(made, device, 8, 20 * GIB) == TOTAL - 20 * GIB - beside
    # The peak is that of an earlier step: nothing tells what this one took.
    assert [step(made, device, 4, GIB) for _ in range(3)] == [TOTAL - 20 * GIB - beside] * 3
    device.peak = 0  # the program counts anew in each step
    step(made, device, 8, 16 * GIB)
    assert step(made, device, 8, 17 * GIB) == TOTAL - 35 * GIB // 2 - beside, "one step alone says little"


def test_a_device_is_looked_at_less_often_the_more_room_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    made, _, _ = ledger()
    for _ in range(640):
        device.use(64 * MIB)
        made.hold(64 * MIB, 64 * MIB, CUDA)
    assert 10 < device.looks < 64


def test_peaks_of_several_devices_say_nothing_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    made, _, _ = ledger()
    made.hold(0, 0, torch.device("cuda", 1))
    rooms = {step(made, device, 8, 20 * GIB) for _ in range(2)}
    assert len(rooms) == 1
