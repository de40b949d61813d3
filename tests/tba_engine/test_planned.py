"""Tier "auto" under a budget: it watches, plans, moves or recomputes by plan, and every gradient is plain PyTorch's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.engine import reserved_bytes, watched
from support.models import Made
from support.planned import (
    LAYERS,
    ROWS,
    SLOW,
    WIDTH,
    Block,
    Training,
    assert_equal,
    follow,
    follow_as_plain,
    nothing,
    saved_bytes,
    train,
)
from tba import BudgetError, ConfigError, OffloadConfig, Offloader
from tba._blocks.forwards import Forwards
from tba._blocks.trial import Trial
from tba._plan import clock
from tba._transfer.cost import Cost


@pytest.mark.parametrize("share", [0.35, 0.6, 0.85])
@pytest.mark.parametrize("rates", [{}, SLOW], ids=["fast", "slow"])
def test_gradients_are_plain_ones_and_the_plan_is_kept_to(
    auto: Callable[..., Offloader], share: float, rates: dict[str, str]
) -> None:
    budget = int(share * saved_bytes())
    training = Training()
    offload = auto(training.model, memory_budget=budget, **rates)
    plans = follow(offload, training, 8)
    assert_equal(training.state(), train(None, Training(), steps=8))
    measured = [plan.measured for plan in plans if plan and plan.measured is not None]
    assert measured  # a plan made in the last step has not been carried out
    assert max(each.peak_bytes for each in measured) <= budget
    plan, stats = plans[-2], offload.stats()  # the plan that the last step was carried out by
    assert plan
    assert plan.fits
    assert stats.last_step is not None
    gone = sum(plan.facts.block_bytes(block) - plan.facts.blocks[block].input_bytes for block in plan.recomputed)
    gone += sum(plan.facts.saved[index].nbytes for index in plan.derived)
    assert stats.last_step.offloaded_bytes + gone >= saved_bytes() - budget
    if rates and share < 0.8:  # so little may well go for nothing while a busy machine computes
        assert plan.recomputed or plan.derived
    assert bool(plan.recomputed) == bool(plan.predicted.replayed_s)


def test_autocast_and_keyword_tensors_survive_recomputation(auto: Callable[..., Offloader]) -> None:
    def run(training: Training, offload: Offloader | None) -> list[Tensor]:
        scale = torch.full((WIDTH,), 0.5, requires_grad=True)
        for number in range(6):
            with offload if offload is not None else nothing(), torch.autocast("cpu", torch.bfloat16):
                training.step(number=number, scale=scale)
        assert scale.grad is not None
        return [*training.state(), scale.grad]

    training = Training()
    offload = auto(training.model, memory_budget=int(0.4 * saved_bytes()), derive=False, **SLOW)
    assert_equal(run(training, offload), run(Training(), None))
    assert offload.plan
    assert offload.plan.recomputed


def test_steps_that_never_repeat_are_watched_no_more(
    auto: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called alike, they save other sizes each time: after some tries no block is run again to be tried."""
    tried = []

    def run_again(trial: Trial, first: Any) -> tuple[str, float | None]:
        tried.append(first)
        return original(trial, first)

    original = Trial._run_again
    monkeypatch.setattr(Trial, "_run_again", run_again)

    class Uneven(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(torch.cat([x, x[: steps[0]]]))[: len(x)]

    steps = [0]

    training = Training(Uneven)
    offload = auto(training.model, memory_budget=int(0.4 * saved_bytes()))
    counts = []
    for number in range(14):
        before, steps[0] = len(tried), 8 + 8 * number
        with offload:
            training.step(number=number)
        counts.append(len(tried) - before)
    assert max(counts) == LAYERS  # some steps ran each block twice
    assert counts[-3:] == [0] * 3
    assert all("forward" not in vars(module) for module in training.model.modules())


def test_a_budget_that_is_never_reached_stands_around_nothing(
    auto: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, put = Training(), []
    monkeypatch.setattr(Forwards, "put", lambda _self, modules, _around: put.append(len(list(modules))))
    offload = auto(training.model, memory_budget="1GiB")
    train(offload, training, steps=4)
    assert len(put) == 1  # in the first step, which tells that it fits


def test_forwards_without_a_backward_are_not_watched_for_ever(
    auto: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tba._auto.execution._MOST_WATCHED", 100, raising=False)
    training = Training()
    offload = auto(training.model, memory_budget=int(0.5 * saved_bytes()))
    most, alive = 0, []  # a graph that dies is no part of what follows it
    with offload:
        for _ in range(20):
            alive.append(training.model(torch.ones(ROWS, WIDTH)))
            most = max(most, watched(offload))
    assert 100 < most < 200
    alive.clear()
    follow_as_plain(offload, training)


def test_a_plan_takes_no_room_from_steps_that_are_not_its_own(auto: Callable[..., Offloader]) -> None:
    training = Training()
    offload = auto(training.model, memory_budget=int(0.5 * saved_bytes()), **SLOW)
    plan = follow(offload, training, 4)[-1]
    assert plan
    assert plan.recomputed
    assert reserved_bytes(offload) == (0, 0)
    with offload:  # not by the model's own forward
        training.model.layers[0](torch.ones(ROWS, WIDTH)).sum().backward()
    with offload:
        training.step()
        assert reserved_bytes(offload) == (sum(plan.sends.values()), plan.facts.replay_bytes(plan.recomputed))


def test_two_kinds_of_forward_before_a_backward_have_room_to_replay_either(auto: Callable[..., Offloader]) -> None:
    training = Training()
    offload = auto(training.model, memory_budget=int(0.4 * saved_bytes()), **SLOW)
    room_bytes = {}
    for rows in (ROWS, ROWS * 3 // 4):
        plan = follow(offload, training, 4, rows=rows)[-1]
        assert plan
        room_bytes[rows] = plan.facts.replay_bytes(plan.recomputed)
    assert 0 < room_bytes[ROWS * 3 // 4] < room_bytes[ROWS]
    with offload:
        losses = [training.model(torch.ones(rows, WIDTH)).square().mean() for rows in room_bytes]
        assert reserved_bytes(offload)[1] == room_bytes[ROWS]
        torch.stack(losses).sum().backward()
    offload.stats()
    assert reserved_bytes(offload)[1] == 0


def test_without_a_model_storages_move_by_plan(auto: Callable[..., Offloader]) -> None:
    training = Training()
    offload = auto(None, memory_budget=int(0.5 * saved_bytes()))
    plan = follow_as_plain(offload, training)
    assert plan.sends
    assert not plan.facts.blocks


def test_the_model_is_untouched_outside_of_its_forward(auto: Callable[..., Offloader]) -> None:
    training = Training()
    before = list(training.model.state_dict()), [set(vars(module)) for module in training.model.modules()]
    offload = auto(training.model, memory_budget=int(0.4 * saved_bytes()), **SLOW)
    for number in range(6):
        with offload:
            training.step(number=number)
            now = list(training.model.state_dict()), [set(vars(module)) for module in training.model.modules()]
            assert now == before
            copied = copy.deepcopy(training.model)
            pickle.dumps(training.model)
    assert offload.plan
    assert offload.plan.recomputed
    assert [type(module) for module in copied.modules()] == [type(module) for module in training.model.modules()]


def test_a_new_shape_is_planned_anew_and_an_old_one_is_remembered(auto: Callable[..., Offloader]) -> None:
    def run(training: Training, offload: Offloader | None) -> list[Tensor]:
        for number in range(14):
            with offload if offload is not None else nothing():
                training.step(rows=ROWS if number < 5 or number > 10 else ROWS // 2 + 7, number=number)
            if offload is not None:
                plans.append(offload.plan)
        return training.state()

    plans: list[Any] = []
    training = Training()
    offload = auto(training.model, memory_budget=int(0.3 * saved_bytes()))
    assert_equal(run(training, offload), run(Training(), None))
    sizes = [plan.facts.saved_bytes if plan else 0 for plan in plans]
    assert sizes[4] > sizes[9] > 0
    assert sizes[-1] == sizes[4]


@pytest.mark.parametrize("attached", [True, False], ids=["attached", "one context around all steps"])
def test_a_loop_that_enters_nothing_is_planned(attached: bool, auto: Callable[..., Offloader]) -> None:
    training = Training()
    offload = auto(training.model, memory_budget=int(0.4 * saved_bytes()), **SLOW)
    if attached:
        offload.tie_to(training.model)
    with nothing() if attached else offload:
        trained = train(None, training)
        assert offload.plan
        assert offload.plan.recomputed
    assert_equal(trained, train(None, Training()))


def test_a_sparse_argument_of_a_block_is_none_of_its_input_bytes(auto: Callable[..., Offloader]) -> None:
    class Mixes(Block):
        def forward(self, x: Tensor, mix: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(torch.sparse.mm(mix, x), scale)

    def given() -> nn.Module:
        def forward(self: Any, x: Tensor) -> Tensor:
            mix = torch.eye(ROWS).to_sparse()
            return self.other(self.one(x, mix), mix)  # type: ignore[no-any-return]

        return Made(forward, one=Mixes(), other=Mixes())

    training = Training(given, layers=3)
    offload = auto(training.model, memory_budget=int(0.5 * saved_bytes()), blocks=Mixes, **SLOW)
    plan = follow_as_plain(offload, training)
    assert any(block.replay_s is not None for block in plan.facts.blocks)


def test_what_the_user_checkpoints_is_left_alone(auto: Callable[..., Offloader]) -> None:
    def checkpointed() -> nn.Module:
        return Made(lambda self, x: checkpoint(self.inner, x, use_reentrant=False), inner=Block())

    training = Training(checkpointed)
    offload = auto(training.model, memory_budget=int(0.2 * saved_bytes() / 10), **SLOW)
    assert_equal(train(offload, training), train(None, Training(checkpointed)))
    assert not offload.plan or not offload.plan.recomputed


def test_two_forwards_before_one_backward(auto: Callable[..., Offloader]) -> None:
    def run(training: Training, offload: Offloader | None) -> list[Tensor]:
        for number in range(6):
            with offload if offload is not None else nothing():
                torch.manual_seed(number)
                one = training.model(torch.ones(ROWS, WIDTH))
                other = training.model(torch.ones(ROWS, WIDTH) * number)
                (one * other).mean().backward(retain_graph=number % 2 == 1)
                if number % 2:
                    one.mean().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        return training.state()

    training = Training()
    offload = auto(training.model, memory_budget=int(0.6 * saved_bytes()), **SLOW)
    assert_equal(run(training, offload), run(Training(), None))
    assert offload.plan


def test_a_budget_that_cannot_be_met_is_an_error_with_numbers(auto: Callable[..., Offloader]) -> None:
    training = Training(layers=3)
    offload = auto(training.model, memory_budget=ROWS * WIDTH * 4)
    with pytest.raises(
        BudgetError, match=r"memory_budget=256.0 KiB cannot be met: of .* Set it to .* or use tier=.nvme."
    ):
        train(offload, training, steps=5)
    offload.close()
    train(None, training, steps=1)  # the model trains on without it


# -- what may be written -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:offloading. the write of:UserWarning")  # of the steps that are watched
def test_a_small_disk_is_kept_to_by_recomputing(auto: Callable[..., Offloader]) -> None:
    training = Training()
    budget, disk = int(0.4 * saved_bytes()), int(0.2 * saved_bytes())
    offload = auto(training.model, memory_budget=budget, nvme_budget=disk)
    plan, last = follow_as_plain(offload, training, 9), offload.stats().last_step
    assert plan.fits
    assert plan.recomputed
    assert plan.facts.most_moved_bytes < disk
    assert last is not None
    assert 0 < last.offloaded_bytes <= disk


@pytest.mark.filterwarnings("ignore:offloading. the write of:UserWarning")
def test_a_disk_that_is_too_small_is_an_error_with_numbers(auto: Callable[..., Offloader]) -> None:
    class Random(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(x, scale) * next(draws)

    draws = (1.0 + number / 1000 for number in range(10**6))
    training = Training(Random)
    offload = auto(training.model, memory_budget=int(0.5 * saved_bytes()), nvme_budget="256KiB")
    message = r"would have to be written, and scratch files may take 256.0 KiB \(nvme_budget\)\. Raise that"
    with pytest.raises(BudgetError, match=message):
        train(offload, training, steps=6)


def test_an_allowance_that_runs_out_turns_moves_into_recomputation(
    auto: Callable[..., Offloader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    training = Training()
    budget, allowance = int(0.5 * saved_bytes()), int(3.2 * saved_bytes())
    offload = auto(training.model, memory_budget=budget, max_write_bytes_per_day=allowance)
    # A write that is called off costs no allowance: what forward sends is written before backward asks.
    training.model.register_forward_hook(lambda *_: offload.flush())
    plans = follow(offload, training, 14)
    assert_equal(training.state(), train(None, Training(), steps=14))
    assert 0 < offload.stats().written_bytes <= allowance
    assert all(not plan or plan.fits for plan in plans)
    recomputed = [0 if not plan else len(plan.recomputed) for plan in plans]
    assert recomputed[-1] > recomputed[3]


# -- the paper's rule --------------------------------------------------------------------------------------------------


def test_the_papers_rule_is_a_policy(auto: Callable[..., Offloader]) -> None:
    training = Training()
    offload = auto(training.model, policy="tba", max_write_rate="400MB")
    plan = follow_as_plain(offload, training)
    assert offload.stats().offloaded_bytes >= sum(plan.sends.values())
    assert not plan.recomputed


@pytest.mark.parametrize("other", [{"tier": "nvme"}, {"memory_budget": "1GiB"}, {"compress": "exact"}])
def test_the_papers_rule_knows_no_budget(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"policy='tba' was given with tier=.*, memory_budget="):
        OffloadConfig(policy="tba", **({"tier": "auto"} | other))


def test_hooks_are_timed_for_records_alone(auto: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch) -> None:
    worked: list[float] = []
    monkeypatch.setattr(type(clock.current), "worked_s", lambda self, seconds: worked.append(seconds) or 1.0)
    training = Training()
    offload = auto(training.model, memory_budget=int(0.6 * saved_bytes()))
    costs: list[tuple[int, int]] = []
    end_step = Cost.end_step

    def end(cost: Cost) -> None:
        costs.append((cost.records, round(cost.hooks_s)))
        end_step(cost)

    monkeypatch.setattr(Cost, "end_step", end)
    plans = follow(offload, training, 6)
    assert worked
    assert all(seconds >= 0 for seconds in worked)
    last = plans[-1]
    assert last
    watched, followed = costs[0], costs[-1]
    assert watched[0] >= len(last.facts.saved)  # each has a record while nothing is known
    assert len(last.moved) <= followed[0] < watched[0]
    assert followed[1] >= 2 * len(last.moved)  # saved once, and asked for
