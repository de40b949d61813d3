"""The simulated step: what it takes in time and in memory, by figures that can be worked out by hand."""

from __future__ import annotations

import pytest

from support.plans import MIB, layers, storages
from tba._plan.facts import Link
from tba._plan.plan import where
from tba._plan.simulate import simulate

EVERY_BYTE_AT_ONCE = Link(1e15, 1e15)


def test_all_kept_takes_the_step_and_all_bytes() -> None:
    facts = layers(4, 4)
    found = simulate(facts, (), ())
    assert found.step_s == pytest.approx(facts.step_s)
    assert found.peak.nbytes == facts.saved_bytes
    assert where(facts, found, found.peak) == "at the end of forward"
    assert not found.transfers
    assert found.moments[-1].nbytes == 0


def test_an_instant_link_leaves_only_what_backward_reads_ahead() -> None:
    facts = storages([MIB] * 40, EVERY_BYTE_AT_ONCE, read_ahead_bytes=4 * MIB)
    found = simulate(facts, range(40), ())
    assert found.waited_s == pytest.approx(0, abs=1e-6)
    assert found.peak.nbytes <= 5 * MIB
    assert found.moved_bytes == 40 * MIB
    assert found.read_bytes >= 38 * MIB  # the last are asked for while still on their way


def test_a_slow_link_makes_forward_wait_at_the_cap() -> None:
    # 40 MiB in one second; the link writes 10 MiB/s and 8 MiB may be in flight: 32 MiB must have gone, in 3.2 s.
    link = Link(10 * MIB, 1e15, in_flight_bytes=8 * MIB)
    found = simulate(storages([MIB] * 40, link), range(40), ())
    assert found.turn_s == pytest.approx(3.2, rel=0.05)
    assert max(moment.out_bytes for moment in found.moments) <= 8 * MIB


def test_a_slow_link_makes_backward_wait_for_each() -> None:
    link = Link(1e15, 10 * MIB)
    found = simulate(storages([MIB] * 40, link), range(40), ())
    # 39 or 40 MiB at 10 MiB/s, and the first is asked for at once.
    assert found.step_s - found.turn_s == pytest.approx(4.0, rel=0.05)


def test_forward_waits_at_the_budget_where_that_helps() -> None:
    link = Link(10 * MIB, 1e15)
    found = simulate(storages([MIB] * 40, link), range(40), (), budget_bytes=6 * MIB)
    assert found.peak.nbytes <= 6 * MIB


def test_transfers_cost_the_step_what_the_link_says() -> None:
    facts = storages([MIB] * 10, Link(1e15, 1e15, 1e-9))
    found = simulate(facts, range(10), ())
    moved = found.moved_bytes + found.read_bytes
    assert found.step_s == pytest.approx(facts.step_s + moved * 0.5e-9, rel=1e-6)


def test_a_block_that_recomputes_keeps_its_input_and_comes_back_whole() -> None:
    facts = layers(4, 4, input_bytes=MIB)
    found = simulate(facts, (), (0, 1, 2, 3))
    assert found.replayed_s == pytest.approx(facts.forward_s)
    assert found.step_s == pytest.approx(facts.step_s + facts.forward_s)
    assert found.peak.nbytes == 4 * MIB + 8 * MIB
    assert where(facts, found, found.peak) in ("at the end of forward", "in backward, block 3")
    assert found.moments[-1].nbytes == 0


def test_transfers_do_not_overlap_and_come_in_order() -> None:
    found = simulate(storages([MIB] * 20, Link(30 * MIB, 20 * MIB)), range(20), ())
    for one, other in zip(found.transfers, found.transfers[1:], strict=False):
        assert one.start_s < one.end_s <= other.start_s + 1e-12
