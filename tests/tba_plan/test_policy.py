"""Policy: every decision is a function of what is recorded."""

from __future__ import annotations

import pytest

from tba._memory.limits import (
    default_window_bytes,
    hold_budget_bytes,
    io_threads,
    limits,
    read_ahead_bytes,
    window_bytes,
)
from tba._plan.policy import (
    FITS,
    Decision,
    decisions,
    planned_burst_bytes,
    range_to_store,
    read_burst_bytes,
    write_burst_bytes,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("tier", "on_device", "used_at_once", "decision", "reason"),
    [
        ("nvme", False, False, Decision.SEND, ""),
        ("nvme", True, False, Decision.SEND, ""),
        ("cpu", True, False, Decision.SEND, ""),
        ("cpu", False, False, Decision.KEEP, "already in host memory"),
        ("auto", False, False, Decision.HOLD, FITS),
        ("auto", True, False, Decision.HOLD, FITS),
        ("keep", True, False, Decision.KEEP, "tier keep"),
        ("keep", False, False, Decision.KEEP, "tier keep"),
        ("keep", False, True, Decision.KEEP, "recomputed"),
        ("nvme", False, True, Decision.KEEP, "recomputed"),
        ("auto", True, True, Decision.KEEP, "recomputed"),
        ("cpu", True, True, Decision.KEEP, "recomputed"),
    ],
)
def test_decisions(tier: str, on_device: bool, used_at_once: bool, decision: Decision, reason: str) -> None:
    assert decisions(tier, compresses=False)[on_device, used_at_once] == (decision, reason)
    if decision is Decision.KEEP and reason != "recomputed":
        decision = Decision.SHRINK
    found = decisions(tier, compresses=True)[on_device, used_at_once]
    assert found == (decision, reason), "what is needed next stays as it is, all else that stays is compressed"


@pytest.mark.parametrize(
    ("begin", "end", "storage_bytes", "stored"),
    [
        (0, 4096, 4096, (0, 4096)),  # the whole
        (1024, 3072, 4096, (0, 4096)),  # half of it takes the rest along
        (1024, 3068, 4096, (1024, 3068)),  # less does not
        (0, 4, 4096, (0, 4)),
        (4092, 4096, 4096, (3584, 4096)),  # begins at a multiple of 512 bytes, so that addresses keep their alignment
        (513, 533, 4096, (512, 533)),
        (512, 533, 4096, (512, 533)),
    ],
)
def test_range_to_store(begin: int, end: int, storage_bytes: int, stored: tuple[int, int]) -> None:
    assert range_to_store(begin, end, storage_bytes) == stored


def test_a_stored_range_holds_the_view_and_little_more() -> None:
    size = 9000
    for begin in range(0, size, 71):
        for end in range(begin + 1, size + 1, 130):
            first, last = range_to_store(begin, end, size)
            assert 0 <= first <= begin
            assert end <= last <= size
            assert (first, last) == (0, size) or (first % 512 == 0 and last - first < end - begin + 512)
            assert (first, last) == (0, size) or 2 * (end - begin) < size


@pytest.mark.parametrize(
    ("held", "free", "reserve", "budget"),
    [(0, 1000, 300, 700), (500, 1000, 300, 1200), (500, 200, 300, 400), (500, 0, 300, 200), (100, 50, 300, 0)],
)
def test_hold_what_leaves_the_reserve_free(held: int, free: int, reserve: int, budget: int) -> None:
    assert hold_budget_bytes(held, free, reserve) == budget


@pytest.mark.parametrize(("total_mib", "window_mib"), [(0, 4), (64, 4), (320, 20), (640, 40), (1024, 40), (65536, 40)])
def test_the_window_is_a_sixteenth_of_memory_within_bounds(total_mib: int, window_mib: int) -> None:
    assert default_window_bytes(total_mib * MIB) == window_mib * MIB


@pytest.mark.parametrize(("device_gib", "window_mib"), [(80, 1024), (16, 1024), (8, 512), (0, 4)])
def test_a_device_gets_a_larger_window(device_gib: int, window_mib: int) -> None:
    assert default_window_bytes(1 << 40, device_gib << 30) == window_mib * MIB
    assert default_window_bytes(1 << 30, device_gib << 30) == min(64, window_mib) * MIB  # bounded by the host as well
    assert limits(None, None, 60.0, 1 << 40, device_gib << 30).window_bytes == window_mib * MIB


@pytest.mark.parametrize(
    ("window", "largest", "read_ahead"), [(40, 0, 20), (40, 8, 20), (40, 16, 32), (40, 30, 40), (0, 8, 0)]
)
def test_reading_ahead_fills_half_of_the_window_or_two_tensors(window: int, largest: int, read_ahead: int) -> None:
    assert read_ahead_bytes(window, largest) == read_ahead


@pytest.mark.parametrize(("largest", "window"), [(0, 24), (4, 24), (8, 24), (10, 30), (16, 40), (100, 40)])
def test_the_window_holds_three_of_the_largest_tensors_within_bounds(largest: int, window: int) -> None:
    by_default = limits(None, None, 60.0, 1024 * MIB)
    assert window_bytes(by_default, largest * MIB) == window * MIB
    assert window_bytes(limits(None, 7 * MIB, 60.0, 1024 * MIB), largest * MIB) == 7 * MIB  # as it was set
    assert window_bytes(limits(None, None, 60.0, 64 * MIB), largest * MIB) == 4 * MIB  # little memory
    assert window_bytes(limits(None, None, 60.0, 1 << 40, 80 << 30), largest * MIB) == 1024 * MIB  # a device's


def test_limits_allow_more_out_than_in_and_half_of_a_budget_at_most() -> None:
    budgets, most = (1, 4, 16, 24, 1024), (1, 4, 16, 16, 16)
    assert [write_burst_bytes(n * MIB, 40 * MIB) for n in budgets] == [n * MIB // 2 for n in most]
    assert write_burst_bytes(24 * MIB, 4 * MIB) == 2 * MIB, "or a step would wait for room in the middle of a burst"
    assert [read_burst_bytes(n * MIB) for n in budgets] == [n * MIB // 4 for n in most]
    assert write_burst_bytes(0, MIB) == read_burst_bytes(0) == 0


@pytest.mark.parametrize(
    ("budget", "planned", "rate", "burst"),
    [
        (256, 256, 10_000, 8),
        (96, 96, 10_000, 6),
        (48, 48, 10_000, 4),
        (8, 48, 10_000, 2),  # a quarter of the budget
        (48, 8, 10_000, 2),  # or of the plan
        (48, 48, 1_600, 3.2),  # what the link carries in two milliseconds
        (48, 48, 100, 3),
    ],
)
def test_a_plan_writes_in_portions_that_neither_wake_a_worker_often_nor_leave_the_link_idle(
    budget: int, planned: int, rate: int, burst: float
) -> None:
    found = planned_burst_bytes(budget * MIB, planned * MIB, 64 * MIB, rate * MIB)
    assert found == pytest.approx(burst * MIB, abs=1)
    assert planned_burst_bytes(budget * MIB, planned * MIB, 2 * MIB, rate * MIB) <= MIB  # of what may be in flight


@pytest.mark.parametrize(
    ("asked", "on_device", "cores", "threads"),
    [
        (None, False, 1, 1),
        (None, False, 7, 1),
        (None, False, 8, 2),
        (None, True, 2, 2),
        (3, False, 2, 3),
        (1, True, 64, 1),
    ],
)
def test_workers_where_none_are_asked_for_leave_few_cores_to_the_step(
    asked: int | None, on_device: bool, cores: int, threads: int
) -> None:
    assert io_threads(asked, on_device=on_device, cores=cores) == threads


def test_limits_by_default() -> None:
    found = limits(None, None, 60.0, 512 * MIB)
    assert (found.staging_bytes, found.window_bytes) == (32 * MIB, 32 * MIB)
    assert found.reserve_bytes == (32 + 32 + 32) * MIB
    assert found.timeout_s == 60.0


def test_limits_that_were_set_stay_and_count_in_the_reserve() -> None:
    found = limits(5 * MIB, 0, 1.5, 512 * MIB)
    assert (found.staging_bytes, found.window_bytes) == (5 * MIB, 0)
    assert found.reserve_bytes == (5 + 0 + 32) * MIB
    assert limits(None, 7 * MIB, 1.5, 512 * MIB).staging_bytes == 32 * MIB
