"""Plans derive: what others give again does not stay, with no preset set, and gradients are plain PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.planned import (
    LAYERS,
    ROWS,
    WIDTH,
    Edited,
    Gated,
    Training,
    assert_equal,
    follow,
    records,
    saved_bytes,
    train,
)
from tba import EditedError, Offloader
from tba._engine.read_ahead import ReadAhead
from tba._plan.facts import OUTSIDE
from tba._plan.no_plan import NoPlan
from tba._plan.plan import Plan

WIDE_BYTES = ROWS * 4 * WIDTH * 4
CRAWLS = {"max_write_rate": "10MB", "max_read_rate": "10MB"}  # so that nothing moves that need not

Auto = Callable[..., Offloader]


def most_bytes() -> int:
    """A budget that the step exceeds by three of its largest tensors, which others give again."""
    return saved_bytes() - 3 * WIDE_BYTES


def derived_bytes(plan: Plan | NoPlan) -> int:
    return sum(plan.facts.saved[index].nbytes for index in plan.derived) if isinstance(plan, Plan) else 0


def test_a_plan_derives_what_is_cheap_and_later_steps_do_the_same(auto: Auto) -> None:
    training = Training()
    offload = auto(training.model, memory_budget=most_bytes(), **CRAWLS)
    plans, made, derived = [offload.plan], [], []
    for number in range(7):
        before = records(offload), offload.stats().derived_bytes
        plans += follow(offload, training, 1, first=number)
        made.append(records(offload) - before[0])
        derived.append(offload.stats().derived_bytes - before[1])
    assert_equal(training.state(), train(None, Training(), steps=7))
    assert derived == [derived_bytes(plan) for plan in plans[:-1]]  # the one that the step began with
    plan = plans[-1]
    assert isinstance(plan, Plan)
    assert derived_bytes(plan) >= 2 * WIDE_BYTES
    assert (plan.sends, plan.recomputed) == ({}, frozenset())
    assert plan.measured is not None
    assert plan.measured.peak_bytes <= most_bytes()
    assert f"derived, {len(plan.derived)} tensors" in str(plan)
    light = [number for number in range(4, 7) if isinstance(plans[number], Plan)]
    assert any(made[number] == len(plans[number].derived) for number in light)  # type: ignore[union-attr]


@pytest.mark.exhaustive
def test_what_a_plan_derives_may_follow_from_what_moves(auto: Auto) -> None:
    budget = int(0.3 * saved_bytes())
    training = Training()
    offload = auto(training.model, memory_budget=budget, blocks=nn.Linear, max_write_rate="30MB", max_read_rate="30MB")
    plans = follow(offload, training, 7)
    assert_equal(training.state(), train(None, Training(), steps=7))
    plan = plans[-1]
    assert plan
    moved = plan.sends.keys()
    assert any(moved & {*plan.facts.saved[index].sources} for index in plan.derived)


def test_what_a_comparison_in_forward_reads_back_is_let_go(auto: Auto, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared in the first planned steps may follow from what has moved by then."""
    budget, bring, brought = int(0.2 * saved_bytes()), ReadAhead.bring, []

    def bringing(read_ahead: ReadAhead, record: Any, task: int) -> bool:
        if task == -1:
            brought.append(record.state)
        return bring(read_ahead, record, task)

    monkeypatch.setattr(ReadAhead, "bring", bringing)
    training = Training()
    offload = auto(training.model, memory_budget=budget, blocks=nn.Linear, max_write_rate="30MB", max_read_rate="30MB")
    ledger, left = offload._saver.ledger, []
    for module in training.model.modules():
        module.register_forward_pre_hook(lambda *_: left.append((len(brought), ledger.read_back_bytes)))
    follow(offload, training, 7)
    assert_equal(training.state(), train(None, Training(), steps=7))
    assert any(count for count, _ in left)
    assert not any(nbytes for _, nbytes in left)


@pytest.mark.parametrize("share", [0.15, 0.9])
def test_what_is_derivable_does_not_depend_on_what_has_gone_by_then(share: float, auto: Auto) -> None:
    """Nor on whether the output of one block, which the trial of that keeps, is the input of the next."""
    training = Training(Gated)
    offload = auto(training.model, memory_budget=int(share * saved_bytes(Gated)))
    plan = follow(offload, training, 4)[-1]
    assert_equal(training.state(), train(None, Training(Gated), steps=4))
    assert plan
    derivable = {(each.place.block, each.place.number) for each in plan.facts.saved if each.derive_s is not None}
    inputs, wide = {(block, 0) for block in (*range(1, LAYERS), OUTSIDE)}, {(block, 2) for block in range(LAYERS)}
    assert derivable == inputs | wide


def test_nothing_is_derived_where_that_is_off(auto: Auto) -> None:
    training = Training()
    offload = auto(training.model, memory_budget=most_bytes(), derive=False, **CRAWLS)
    plan = follow(offload, training, 5)[-1]
    assert plan
    assert not plan.derived
    assert plan.sends or plan.recomputed
    assert offload.stats().derived_bytes == 0


@pytest.mark.exhaustive
def test_another_shape_in_a_step_that_derives_has_plain_gradients(auto: Auto) -> None:
    def run(training: Training, offload: Offloader | None) -> list[Tensor]:
        for number, rows in enumerate((*(ROWS,) * 6, ROWS // 2, 2 * ROWS, *(ROWS,) * 2)):
            train_step(training, offload, number, rows)
        return training.state()

    def train_step(training: Training, offload: Offloader | None, number: int, rows: int) -> None:
        if offload is None:
            training.step(rows, number)
        else:
            follow(offload, training, 1, first=number, rows=rows)

    training = Training()
    offload = auto(training.model, memory_budget=most_bytes(), **CRAWLS)
    assert_equal(run(training, offload), run(Training(), None))
    assert offload.stats().derived_bytes > 0


def test_an_edit_that_pytorch_does_not_see_in_a_step_that_derives(auto: Auto) -> None:
    """Steps by plan raise the error once, and keep that tensor from then on."""
    training, plain = Training(Edited), Training(Edited)
    offload = auto(training.model, memory_budget=most_bytes(), **CRAWLS)

    def step(of: Training, context: Any, *, edits: bool) -> list[Tensor]:
        of.model.zero_grad()
        for layer in of.model.layers:
            layer.edits = edits  # type: ignore[assignment]
        with context:
            loss = of.model(torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)).square().mean()
        loss.backward()
        return [parameter.grad.clone() for parameter in of.model.parameters() if parameter.grad is not None]

    wanted = {edits: step(plain, nullcontext(), edits=edits) for edits in (False, True)}
    for _ in range(7):
        assert_equal(step(training, offload, edits=False), wanted[False])
    assert offload.plan
    assert offload.plan.derived
    errors = 0
    for _ in range(2 * LAYERS):
        try:
            found = step(training, offload, edits=True)
        except EditedError:
            errors += 1
        else:
            assert_equal(found, wanted[True])
            break
    assert 0 < errors <= LAYERS
    assert_equal(step(training, offload, edits=False), wanted[False])


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", [0.25, 0.5, 0.7])
def test_a_plan_of_all_four_ways_has_plain_gradients_and_keeps_to_its_budget(share: float, auto: Auto) -> None:
    training = Training()
    budget = int(share * saved_bytes())
    offload = auto(training.model, memory_budget=budget, max_write_rate="30MB", max_read_rate="30MB")
    plans = follow(offload, training, 8)
    assert_equal(training.state(), train(None, Training(), steps=8))
    measured = [plan.measured for plan in plans if plan and plan.measured is not None]
    assert max(each.peak_bytes for each in measured) <= budget
