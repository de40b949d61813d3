"""A device's plan with two links: to host memory, and from there to a disk; figures that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.plans import MIB, layers, storages
from tba._plan.facts import Link, Spill
from tba._plan.greedy import decide
from tba._plan.simulate import simulate


def link(host_mib: int, *, queued_mib: int = 4, disk: float = 10 * MIB, rate: float = 1e15) -> Link:
    spill = Spill(host_mib * MIB, queued_mib * MIB, disk, disk)
    return Link(rate, rate, in_flight_bytes=8 * MIB, spill=spill)


def test_what_host_memory_holds_never_meets_the_disk() -> None:
    facts = storages([MIB] * 40, link(40))
    one_link = replace(facts, link=replace(facts.link, spill=None))
    found, expected = simulate(facts, range(40), ()), simulate(one_link, range(40), ())
    assert replace(found, seen=[], peak=expected.peak) == replace(expected, seen=[])


def test_a_host_ahead_of_its_device_fills_memory_up_to_the_budget() -> None:
    facts = storages([MIB] * 40, replace(link(40, queued_mib=40), in_flight_bytes=40 * MIB))
    one_link = replace(facts, link=replace(facts.link, spill=None))
    budget_bytes = 12 * MIB  # of which the tensor being computed is the last
    at_once, ahead = (simulate(each, range(38), (), budget_bytes) for each in (one_link, facts))
    assert ahead.step_s == at_once.step_s
    in_forward = [max(each.nbytes for each in found.moments if each.at_s < found.turn_s) for found in (at_once, ahead)]
    assert in_forward[0] < 8 * MIB
    assert in_forward[1] == ahead.held_bytes == budget_bytes
    assert [moment.at_s for moment in ahead.moments] == sorted(moment.at_s for moment in ahead.moments)


def test_a_host_that_waits_for_room_in_host_memory_hears_of_what_was_written() -> None:
    facts = storages([MIB] * 40, replace(link(40, queued_mib=4), in_flight_bytes=40 * MIB))
    found = simulate(facts, range(38), (), 12 * MIB)
    in_forward = max(each.nbytes for each in found.moments if each.at_s < found.turn_s)
    assert 4 * MIB <= in_forward <= 7 * MIB  # 4 on their way, and a burst that is still to be sent
    assert found.waited_s == 0


def test_the_oldest_go_to_the_disk_and_forward_waits_for_it() -> None:
    # 40 MiB in one second, 10 stay: 30 go to the disk, of which 4 may still wait when forward ends: 26 at 10 MiB/s.
    found = simulate(storages([MIB] * 40, link(10)), range(40), ())
    assert found.moved_bytes == 40 * MIB
    assert 26 * MIB <= found.spilled_bytes <= 30 * MIB  # those that wait are wanted before they have gone
    assert {each.number for each in found.transfers if each.kind == "spill"} <= set(range(30))
    assert found.turn_s == pytest.approx(10 / 40 + 2.6, abs=0.2)


def test_backward_takes_what_is_in_host_memory_at_once_and_waits_for_the_rest() -> None:
    found = simulate(storages([MIB] * 40, link(10)), range(40), ())
    fetched = [each for each in found.transfers if each.kind == "fetch"]
    assert set(range(26)) <= {each.number for each in fetched} <= set(range(30))
    assert found.step_s - found.turn_s == pytest.approx(3.0, rel=0.2)


def test_a_fast_disk_is_as_good_as_more_host_memory() -> None:
    slow, fast, more = (
        simulate(storages([MIB] * 40, where), range(40), ()) for where in (link(10), link(10, disk=1e15), link(40))
    )
    assert fast.step_s == pytest.approx(more.step_s, rel=0.01)
    assert slow.step_s > 1.8 * more.step_s


def test_one_storage_larger_than_host_memory_goes_straight_to_the_disk() -> None:
    found = simulate(storages([MIB, 8 * MIB, MIB], link(4)), range(3), ())
    assert {each.number for each in found.transfers if each.kind == "spill"} == {1}


def test_what_makes_way_for_a_large_storage_is_waited_for_by_the_next() -> None:
    sizes = [size * MIB for size in (2, 2, 2, 2, 8) * 4]
    found = simulate(storages(sizes, link(12, queued_mib=8)), range(len(sizes)), ())
    # Of 64 MiB at most 12 and 8 are in host memory at the end: 44 have been written at 10 MiB/s, and 8 more begun.
    assert found.turn_s >= 4.4


def test_what_is_still_being_written_to_the_disk_is_not_read_from_there() -> None:
    found = simulate(storages([MIB] * 12, link(10, disk=MIB / 100)), range(12), ())
    assert found.spilled_bytes <= 2 * MIB
    assert not [each for each in found.transfers if each.kind == "fetch" and each.number > 1]


@pytest.mark.parametrize("host_mib", [0, 8, 32])
@pytest.mark.parametrize("rate", [20 * MIB, 200 * MIB])
def test_no_plan_beats_the_bound_and_more_host_memory_never_hurts(host_mib: int, rate: float) -> None:
    facts = replace(layers(8, 4, input_bytes=MIB), link=link(host_mib, rate=rate))
    plan = decide(facts, 24 * MIB)
    assert plan.fits
    assert plan.predicted.step_s >= plan.bound_s
    roomier = replace(facts, link=link(host_mib + 16, rate=rate))
    assert decide(roomier, 24 * MIB).predicted.step_s <= plan.predicted.step_s * 1.001


def test_a_plan_says_how_much_goes_to_host_memory_and_how_much_on_to_disk() -> None:
    facts = replace(layers(8, 4, input_bytes=MIB), blocks=(), link=link(8, rate=200 * MIB))
    plan = decide(facts, 20 * MIB)
    assert plan.predicted.spilled_bytes
    text = str(plan)
    assert "to host memory" in text
    assert "on to disk" in text
    assert "1 GiB more host memory would save" in text
