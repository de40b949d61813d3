"""Which saved tensors of a compiled graph move, and where among its kernels their transfers begin and end."""

from __future__ import annotations

import pytest

from tba._compiled.choice import Windows, choose, peak_bytes
from tba._compiled.order import Use, order_back, order_out
from tba._memory.limits import Limits

LIMITS = Limits(staging_bytes=4, least_window_bytes=4, window_bytes=4, reserve_bytes=0, timeout_s=1.0)
SIZES = [2] * 20  # saved one after the other, wanted in the reverse order
WANTED = list(range(20, 0, -1))


def test_without_a_budget_all_moves_but_what_backward_wants_first() -> None:
    choice = choose(SIZES, WANTED, 3, None, LIMITS)
    assert choice.moved == list(range(18))
    assert choice.peak_bytes == 3 + 4 + 4  # stays; held; on its way out, and later read ahead


@pytest.mark.parametrize("budget_bytes", [14, 20, 30, 40, 42])
def test_a_budget_is_met_with_no_more_moves_than_it_takes(budget_bytes: int) -> None:
    choice = choose(SIZES, WANTED, 3, budget_bytes, LIMITS)
    assert choice.peak_bytes <= budget_bytes
    fewer = [number for number in choice.moved if number not in choice.moved[::4]]
    assert peak_bytes(SIZES, WANTED, 3, choice.windows, fewer) > budget_bytes


def test_what_fits_stays() -> None:
    assert choose(SIZES, WANTED, 3, 43, LIMITS).moved == []


def test_a_budget_that_nothing_meets_gets_the_lowest_peak() -> None:
    choice = choose(SIZES, WANTED, 30, 20, LIMITS)
    assert choice.peak_bytes == min(choose(SIZES, WANTED, 30, each, LIMITS).peak_bytes for each in (20, 30, 34))


def test_a_peak_counts_what_is_on_its_way_and_what_is_read_ahead() -> None:
    windows = Windows(out_bytes=4, hold_bytes=0, ahead_bytes=2)
    assert peak_bytes([2, 2, 2, 2], [4, 3, 2, 1], 0, windows, []) == 8
    assert peak_bytes([2, 2, 2, 2], [4, 3, 2, 1], 0, windows, [0, 1, 2, 3]) == 4
    assert peak_bytes([2, 2, 2, 2], [4, 3, 2, 1], 1, windows, [0, 1]) == 1 + 8


def test_a_write_is_waited_for_behind_the_last_reader_or_for_room() -> None:
    uses = [Use(2, made, 0, made + 1) for made in (0, 3, 6)]
    assert order_out(uses, 4) == [(0, 6), (3, 1 << 62), (6, 1 << 62)]
    assert order_out(uses, 2) == [(0, 3), (3, 6), (6, 1 << 62)]
    late = [Use(2, 0, 0, 9), Use(2, 1, 0, 1)]
    assert order_out(late, 2)[0] == (0, 9)  # its reader comes later than the room is wanted


def test_a_read_begins_when_the_window_has_room() -> None:
    uses = [Use(2, -1, first, first) for first in (5, 1, 9)]
    assert order_back(uses, 4) == [(-1, 5), (-1, 1), (1, 9)]
    assert order_back(uses, 0) == [(1, 5), (-1, 1), (5, 9)]
