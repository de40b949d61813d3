"""How a compiled graph is split, which of what it saves moves, and where among its kernels transfers begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tba._compiled.candidate import Candidate
from tba._compiled.choice import Lifetimes, Prices, Windows, choose, peak_bytes, step_s
from tba._compiled.flops import flops_of
from tba._compiled.graph_plan import GraphPlan, as_reason
from tba._compiled.order import Use, order_back, order_out
from tba._compiled.recomputed import recomputed_bytes
from tba._compiled.saved import Saved
from tba._compiled.split import Split
from tba._memory.limits import Limits

LIMITS = Limits(staging_bytes=4, least_window_bytes=4, window_bytes=4, reserve_bytes=0, timeout_s=1.0)


def _lives(kept_bytes: int, count: int = 20, again: Sequence[int] = ()) -> Lifetimes:
    """Tensors of two bytes, saved one after the other, wanted in the reverse order."""
    wanted = list(range(count, 0, -1))
    return Lifetimes([2] * count, wanted, wanted, kept_bytes, again)


def test_without_a_budget_all_moves_but_what_backward_wants_first() -> None:
    choice = choose(_lives(3), None, LIMITS)
    assert choice.moved == list(range(18))
    assert choice.peak_bytes == 3 + 4 + 4  # stays; held; on its way out, and later read ahead


@pytest.mark.parametrize("budget_bytes", [14, 20, 30, 40, 42])
def test_a_budget_is_met_with_no_more_moves_than_it_takes(budget_bytes: int) -> None:
    choice = choose(_lives(3), budget_bytes, LIMITS)
    assert choice.peak_bytes <= budget_bytes
    fewer = [number for number in choice.moved if number not in choice.moved[::4]]
    assert peak_bytes(_lives(3), choice.windows, fewer) > budget_bytes


def test_what_fits_stays() -> None:
    assert choose(_lives(3), 43, LIMITS).moved == []


def test_a_budget_that_nothing_meets_gets_the_lowest_peak() -> None:
    choice = choose(_lives(30), 20, LIMITS)
    assert choice.peak_bytes == min(choose(_lives(30), each, LIMITS).peak_bytes for each in (20, 30, 34))


def test_a_peak_counts_what_is_on_its_way_and_what_is_read_ahead() -> None:
    lives = _lives(1, 4)
    windows = Windows(out_bytes=4, hold_bytes=0, ahead_bytes=2)
    assert peak_bytes(lives, windows, []) == 1 + 8
    assert peak_bytes(lives, windows, [0, 1, 2, 3]) == 1 + 4
    assert peak_bytes(lives, windows, [0, 1]) == 1 + 8
    assert peak_bytes(lives, Windows(out_bytes=2, hold_bytes=0, ahead_bytes=2), [0, 1]) == 1 + 6
    assert peak_bytes(lives, Windows(out_bytes=1, hold_bytes=0, ahead_bytes=3), [0, 1]) == 1 + 6


def test_a_window_counts_by_its_fullest_moment_wherever_that_is() -> None:
    """Kernels may run in another order than the graph's: what stays and a full window count as if they met."""
    first, last = Lifetimes([4, 2, 2], [3, 2, 1], [3, 2, 1], 0), Lifetimes([2, 2, 4], [3, 2, 1], [3, 2, 1], 0)
    windows = Windows(out_bytes=4, hold_bytes=0, ahead_bytes=4)
    assert peak_bytes(first, windows, [0]) == peak_bytes(last, windows, [2]) == 4 + 4


def test_what_backward_computes_again_takes_the_room_of_what_it_has_let_go_of() -> None:
    windows = Windows(out_bytes=2, hold_bytes=0, ahead_bytes=2)
    assert peak_bytes(_lives(1, 4, again=[5]), windows, []) == 1 + 8 + 5
    assert peak_bytes(_lives(1, 4, again=[0, 0, 20, 0, 0]), windows, []) == 1 + 6 + 20  # the one wanted first is gone
    assert peak_bytes(_lives(1, 4, again=[0, 0, 0, 0, 20]), windows, []) == 1 + 2 + 20
    assert peak_bytes(_lives(1, 4, again=[0, 0, 0, 0, 20]), windows, [0]) == 1 + 2 + 20  # it is read ahead instead
    assert peak_bytes(_lives(1, 4, again=[0, 0, 0, 0, 20]), windows, [0, 1]) == 1 + 2 + 20


def test_a_budget_counts_what_is_computed_again() -> None:
    lives = _lives(0, again=[6] * 21)
    assert choose(lives, 46, LIMITS).moved == []
    fewer = choose(lives, 45, LIMITS)
    assert fewer.moved
    assert fewer.peak_bytes <= 45


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


KIB = 1 << 10


def _split(count: int, *, again: int = 0, kept: int = 3) -> Split:
    root: Any = None
    saved = [Saved(root, {}, {}, 2 * KIB, number, count - number, count - number) for number in range(count)]
    flops = {"forward_flops": 100, "backward_flops": 200 + again}
    return Split(forward=None, backward=None, share=1.0, saved=saved, kept_bytes=kept * KIB, **flops)


def _best(*splits: Split, budget: int, prices: Prices) -> Split:
    limits = replace(LIMITS, staging_bytes=4 * KIB, least_window_bytes=4 * KIB, window_bytes=4 * KIB)
    found = [Candidate.of(each, budget * KIB, limits, prices) for each in splits]
    return min(found, key=lambda each: each.rank).split


CHEAP_MOVES, DEAR_MOVES = Prices(flop_s=1.0, byte_s=0.1 / KIB), Prices(flop_s=1.0, byte_s=10.0 / KIB)
SLOW_LINK = Prices(flop_s=1.0, byte_s=0.1 / KIB, write_s=50.0 / KIB)


def test_a_graph_is_split_as_a_step_within_the_budget_takes_least() -> None:
    whole, less, least = _split(20), _split(10), _split(4, again=30)
    assert _best(whole, less, least, budget=43, prices=CHEAP_MOVES) is whole  # all fits
    assert _best(whole, less, least, budget=20, prices=CHEAP_MOVES) is less  # moves less, computes no more
    assert _best(whole, least, budget=20, prices=CHEAP_MOVES) is whole
    assert _best(whole, least, budget=20, prices=DEAR_MOVES) is least
    assert _best(whole, least, budget=20, prices=SLOW_LINK) is least


def test_a_split_that_meets_the_budget_comes_first_then_the_lowest_peak() -> None:
    large, small = _split(2, kept=30), _split(2, again=1000, kept=10)
    assert _best(large, small, budget=14, prices=CHEAP_MOVES) is small
    assert _best(large, small, budget=5, prices=CHEAP_MOVES) is small


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


def _traced(run: Callable[..., Any], *given: Tensor) -> Graph:
    return make_fx(run)(*given).graph


def test_memory_of_what_is_computed_again_lasts_to_its_last_reader() -> None:
    """Operators have one name in both graphs, as the partitioner gives them."""

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x, (functional.gelu(x @ weight) @ weight.t()).cos()

    def backward(x: Tensor, weight: Tensor) -> Tensor:
        product = x @ weight
        bent = functional.gelu(product)
        again = bent @ weight.t()
        return again.view(-1).exp() + product.sum()

    given = torch.randn(2, 4), torch.randn(4, 8)
    made, used = _traced(forward, *given), _traced(backward, *given)
    held = dict(zip([node.name for node in used.nodes], recomputed_bytes(made, used), strict=True))
    wide, narrow = 2 * 8 * 4, 2 * 4 * 4
    assert held == {
        "x_1": 0,
        "weight_1": 0,
        "mm": wide,
        "gelu": wide + wide,  # a matrix product reads it
        "t": 2 * wide,
        "mm_1": 2 * wide + narrow,
        "view": wide + narrow,
        "exp": wide + narrow,  # it reads the second product, as a view
        "sum_1": wide,
        "add": 0,
        "output": 0,
    }


def test_what_only_pointwise_operators_read_and_make_holds_no_memory() -> None:
    def forward(x: Tensor) -> Tensor:
        return functional.gelu(x).cos()

    graph = _traced(forward, torch.randn(2, 4))
    assert recomputed_bytes(graph, graph) == []


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
