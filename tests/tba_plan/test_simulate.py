"""The simulated step: what it takes in time and in memory, by figures that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.plans import MIB, layers, storages
from tba._plan.facts import OUTSIDE, Facts, Link, Place, Saved
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


def test_hooks_cost_the_step_as_much_for_a_small_storage_as_for_a_large_one() -> None:
    link = Link(1e15, 1e15, step_s_per_record=1e-3)
    for nbytes in (MIB, 8 * MIB):
        facts = storages([nbytes] * 10, link)
        found = simulate(facts, (0, 1, 2), ())
        assert found.read_bytes == 3 * nbytes
        assert found.step_s == pytest.approx(facts.step_s + 3e-3, rel=1e-6)


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


def at(*saved: tuple[int, float, float], link: Link = EVERY_BYTE_AT_ONCE, read_ahead_bytes: int = 24 * MIB) -> Facts:
    """A step of one second of forward and one of backward: MiB, when saved and when wanted, of each storage."""
    made = (
        Saved(Place(OUTSIDE, number), size * MIB, saved_s, wanted_s)
        for number, (size, saved_s, wanted_s) in enumerate(saved)
    )
    return Facts(tuple(made), (), 1.0, 1.0, link, read_ahead_bytes)


def test_what_is_read_ahead_is_there_beside_what_is_in_use() -> None:
    facts = at((8, 0.0, 0.9), (4, 0.5, 0.0))
    found = simulate(facts, {0}, ())
    assert found.peak.nbytes == 12 * MIB  # the first is read as backward asks for the second
    assert found.peak.at_s == pytest.approx(1.0)


def test_what_is_to_go_counts_while_it_waits_for_room() -> None:
    link = Link(10 * MIB, 1e15, in_flight_bytes=4 * MIB)
    found = simulate(at((4, 0.0, 0.9), (4, 0.1, 0.8), (1, 0.2, 0.0), link=link), {0, 1}, ())
    held = [(moment.kept_bytes // MIB, moment.out_bytes // MIB) for moment in found.moments[:4]]
    assert held == [(4, 0), (4, 4), (4, 0), (1, 4)]  # the second waits until the first has gone
    assert found.waited_s == pytest.approx(0.3)


def test_what_goes_goes_a_few_at_a_time() -> None:
    facts = storages([MIB] * 64, Link(1e15, 1e15, in_flight_bytes=8 * MIB))
    found = simulate(facts, range(64), ())
    starts = sorted(each.start_s for each in found.transfers if each.kind == "write")
    assert starts == pytest.approx([(number // 4 * 4 + 3) / 64 for number in range(64)])  # a sixteenth of all of them


def test_memory_at_its_limit_lets_go_at_once_what_waits_for_others() -> None:
    facts = storages([MIB] * 64, EVERY_BYTE_AT_ONCE)
    found = simulate(facts, {33, *range(35, 64)}, (), budget_bytes=35 * MIB)  # two at a time, but for that
    assert found.over_bytes <= 0
    first, second = sorted(each.start_s for each in found.transfers if each.kind == "write")[:2]
    assert (first, second) == pytest.approx((34 / 64, 35 / 64))  # as the next is saved, which stays; as it is saved


def test_reads_go_ahead_of_writes_that_have_not_begun() -> None:
    link = Link(10 * MIB, 10 * MIB)
    facts = at((1, 0.0, 0.05), (4, 0.9, 0.9), (4, 0.9, 0.8), (1, 0.95, 0.0), link=link, read_ahead_bytes=MIB)
    order = [(each.kind, each.number) for each in simulate(facts, {0, 1, 2}, ()).transfers]
    assert order[:2] == [("write", 0), ("write", 1)]
    assert order[2] == ("read", 0)  # the second write was queued before


def test_reads_go_ahead_of_a_write_that_others_have_pushed_back() -> None:
    link = Link(10 * MIB, 10 * MIB)
    facts = at((1, 0.0, 0.5), (1, 0.05, 0.05), (4, 0.9, 0.9), (4, 0.9, 0.8), (1, 0.95, 0.0), link=link)
    reads = [each for each in simulate(facts, {0, 1, 2, 3}, ()).transfers if each.kind == "read"]
    assert [each.number for each in reads] == [1, 0]  # a write ends at 1.3; the one behind it has not begun
    assert [each.end_s for each in reads] == pytest.approx([1.4, 1.5])


def test_a_write_of_what_is_wanted_is_cancelled_and_leaves_the_link_to_others() -> None:
    link = Link(6 * MIB, 1e15)
    facts = at((8, 0.0, 0.95), (4, 0.1, 0.0), (4, 0.2, 0.9), link=link, read_ahead_bytes=4 * MIB)
    found = simulate(facts, {0, 1, 2}, ())
    writes = [(each.number, each.start_s, each.end_s) for each in found.transfers if each.kind == "write"]
    first, last = pytest.approx(8 / 6), pytest.approx(12 / 6)
    assert writes == [(0, 0.0, first), (2, first, last)]  # the second is asked for before its write begins
    assert found.moments[-1].nbytes == 0


def test_while_backward_waits_the_link_is_not_idle() -> None:
    link = Link(1e15, 10 * MIB)
    facts = at((1, 0.0, 0.4), (1, 0.1, 0.3), (1, 0.2, 0.0), link=link, read_ahead_bytes=8 * MIB)
    reads = [each for each in simulate(facts, {0, 1, 2}, ()).transfers if each.kind == "read"]
    assert [each.number for each in reads] == [2, 1, 0]
    assert [each.end_s for each in reads] == pytest.approx([1.1, 1.2, 1.3])


def test_a_storage_stays_until_it_is_freed() -> None:
    facts = at((4, 0.0, 0.8), (4, 0.1, 0.4), (4, 0.2, 0.0))
    last = replace(facts.saved[2], freed_s=0.8)  # another operator asks for it again, after the second
    found = simulate(replace(facts, saved=(*facts.saved[:2], last)), (), ())
    held = {round(moment.at_s, 6): moment.nbytes // MIB for moment in found.moments}
    assert (held[1.4], held[1.8]) == (12, 4)
    assert simulate(facts, (), ()).moments[-2].nbytes == 4 * MIB


def test_what_its_graph_keeps_makes_room_for_what_is_read_ahead() -> None:
    facts = at(*((4, number / 8, 0.9 - number / 8) for number in range(7)), read_ahead_bytes=8 * MIB)
    kept = tuple(replace(each, freed_s=2.0) for each in facts.saved)  # as `retain_graph` does
    found = simulate(replace(facts, saved=kept), range(7), (), budget_bytes=16 * MIB)
    assert found.over_bytes <= 0
    assert found.peak.nbytes <= 16 * MIB


def test_what_backward_asks_for_as_its_operator_ends_is_held_and_waits_for_room() -> None:
    facts = at((8, 0.5, 0.9), (4, 1.0, 0.0), link=Link(10 * MIB, 1e15))
    found = simulate(facts, {0, 1}, (), budget_bytes=18 * MIB)  # 10 beside the largest
    assert found.moved_bytes == 8 * MIB
    held = [(moment.kept_bytes // MIB, moment.out_bytes // MIB) for moment in found.moments]
    assert (4, 8) in held
    assert found.waited_s == pytest.approx(0.3)  # the first has gone at 1.3
    assert found.peak.nbytes == 12 * MIB
    assert found.moments[-1].nbytes == 0
