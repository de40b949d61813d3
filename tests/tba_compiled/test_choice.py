"""How a compiled graph is split, which of what it saves moves, and where among its kernels transfers begin and end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tba._compiled.candidate import Candidate
from tba._compiled.choice import Prices, Windows, choose, peak_bytes, step_s
from tba._compiled.graph_plan import GraphPlan, as_reason
from tba._compiled.order import Use, order_back, order_out
from tba._compiled.saved import Saved
from tba._compiled.split import Split, flops_of
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


def test_a_step_costs_what_it_computes_moves_and_waits_for() -> None:
    prices = Prices(flop_s=1.0, byte_s=0.5, write_s=3.0, read_s=2.0)
    assert step_s(0, 30, 60, prices) == 90
    assert step_s(10, 30, 60, prices) == 90 + 5
    assert step_s(20, 30, 60, prices) == 90 + 10 + (60 - 30)
    assert step_s(40, 30, 60, prices) == 90 + 20 + (120 - 30) + (80 - 60)


def _split(count: int, *, again: int = 0, kept_bytes: int = 3) -> Split:
    root: Any = None
    saved = [Saved(root, {}, {}, 2, number, count - number) for number in range(count)]
    flops = {"forward_flops": 100, "backward_flops": 200 + again}
    return Split(forward=None, backward=None, share=1.0, saved=saved, kept_bytes=kept_bytes, **flops)


def _best(*splits: Split, budget_bytes: int, prices: Prices) -> Split:
    found = [Candidate.of(each, budget_bytes, LIMITS, prices) for each in splits]
    return min(found, key=lambda each: each.rank).split


CHEAP_MOVES, DEAR_MOVES = Prices(flop_s=1.0, byte_s=0.1), Prices(flop_s=1.0, byte_s=10.0)
SLOW_LINK = Prices(flop_s=1.0, byte_s=0.1, write_s=50.0)


def test_a_graph_is_split_as_a_step_within_the_budget_takes_least() -> None:
    whole, less, least = _split(20), _split(10), _split(4, again=30)
    assert _best(whole, less, least, budget_bytes=43, prices=CHEAP_MOVES) is whole  # all fits
    assert _best(whole, less, least, budget_bytes=20, prices=CHEAP_MOVES) is less  # moves less, computes no more
    assert _best(whole, least, budget_bytes=20, prices=CHEAP_MOVES) is whole
    assert _best(whole, least, budget_bytes=20, prices=DEAR_MOVES) is least
    assert _best(whole, least, budget_bytes=20, prices=SLOW_LINK) is least


def test_a_split_that_meets_the_budget_comes_first_then_the_lowest_peak() -> None:
    large, small = _split(2, kept_bytes=30), _split(2, again=1000, kept_bytes=10)
    assert _best(large, small, budget_bytes=14, prices=CHEAP_MOVES) is small
    assert _best(large, small, budget_bytes=5, prices=CHEAP_MOVES) is small


def test_the_operations_of_a_graph_are_those_that_pytorch_counts() -> None:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return functional.gelu(x @ weight) @ x.transpose(-1, -2).new_ones(16, 3)

    given = torch.randn(2, 4, 8), torch.randn(8, 16)
    with FlopCounterMode(display=False) as counter:
        run(*given)
    for mode in ("real", "symbolic"):
        assert flops_of(make_fx(run, tracing_mode=mode)(*given).graph) == counter.get_total_flops() > 0


def test_the_attention_of_a_cpu_counts_its_operations() -> None:
    rows, heads, length, size = 2, 3, 8, 4
    heads_of = torch.randn(rows, heads, length, size, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        out: Tensor = functional.scaled_dot_product_attention(x, x, x)
        return torch.autograd.grad(out.sum(), x)[0]

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        graph = make_fx(run)(heads_of).graph
    product = 2 * rows * heads * length * length * size
    assert flops_of(graph) == 2 * product + 5 * product  # forward has two products, backward these and three more


def test_a_graphs_plan_tells_what_moves_and_what_is_computed_again() -> None:
    plan = GraphPlan(
        budget_bytes=4 << 20,
        whole_bytes=9 << 20,
        saved_bytes=6 << 20,
        moved_bytes=3 << 20,
        peak_bytes=4 << 20,
        share=0.5,
    )
    told = "9 MiB saved: 3 MiB move, 3 MiB recompute (activation_memory_budget=0.5); peak 4 MiB of memory_budget=4 MiB"
    assert str(plan) == told
    assert plan.why_not_met() is None
    assert as_reason((plan,)) == f"planned within the compiled graph: {told}"
    moving = GraphPlan(
        budget_bytes=None, whole_bytes=9 << 20, saved_bytes=9 << 20, moved_bytes=8 << 20, peak_bytes=2 << 20, share=1.0
    )
    assert str(moving) == "9 MiB saved: 8 MiB move; peak 2 MiB"
    assert as_reason((plan, moving)) == f"planned within 2 compiled graphs\n  graph 0: {plan}\n  graph 1: {moving}"
