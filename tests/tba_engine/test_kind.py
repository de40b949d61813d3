"""What a kind of step learns of its link from how long steps by plan have waited for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tba._auto.kind import Kind
from tba._plan.facts import Link, Spill

MB = 10**6


def planned(waited_s: float, moved_bytes: int = 50 * MB) -> Kind:
    """A kind whose plan foresees a step of a second, in which so much goes out and comes back by a link of 100 MB/s."""
    found = SimpleNamespace(step_s=1.0, waited_s=waited_s, moved_bytes=moved_bytes, read_bytes=moved_bytes)
    plan: Any = SimpleNamespace(predicted=found, facts=SimpleNamespace(link=Link(100 * MB, 100 * MB)))
    return Kind(plan=plan)


def test_waiting_that_no_plan_foresees_makes_the_link_count_as_slower() -> None:
    kind = planned(0.0)
    assert [kind.compare(0.2), kind.compare(0.2)] == [False, True]
    assert kind.slower == pytest.approx(1.2)  # of a second that all of it took
    assert [kind.compare(0.2), kind.compare(0.2)] == [False, True]
    assert kind.slower == pytest.approx(1.44)


def test_what_a_disk_beneath_host_memory_carries_counts_too() -> None:
    kind = planned(0.0)
    plan: Any = kind.plan
    plan.predicted.spilled_bytes = 20 * MB
    plan.facts.link = Link(1000 * MB, 1000 * MB, spill=Spill(0, 0, 40 * MB, 40 * MB))
    assert [kind.compare(0.55), kind.compare(0.55)] == [False, True]
    assert kind.slower == pytest.approx(1.5)  # of 1.1 seconds, one of them the disk's


def test_one_such_step_tells_nothing() -> None:
    kind = planned(0.0)
    assert not any(kind.compare(waited_s) for waited_s in (0.2, 0.0, 0.2, 0.04, 0.2))
    assert kind.slower == 1.0


def test_less_waiting_than_foreseen_makes_it_faster_again_but_never_faster_than_it_carries() -> None:
    kind = planned(0.3)
    kind.slower = 1.2
    assert [kind.compare(0.1), kind.compare(0.1)] == [False, True]
    assert kind.slower == 1.0
    assert [kind.compare(0.1), kind.compare(0.1)] == [False, False]


def test_a_plan_that_moves_nothing_tells_nothing() -> None:
    kind = planned(0.0, moved_bytes=0)
    assert not any(kind.compare(0.5) for _ in range(4))


def test_a_slowed_link_is_so_many_times_slower() -> None:
    link = Link(100 * MB, 200 * MB, 1e-9, 7)
    assert link.slowed(2.0) == Link(50 * MB, 100 * MB, 1e-9, 7)
    assert link.slowed(2.0).times(link) == 2.0
