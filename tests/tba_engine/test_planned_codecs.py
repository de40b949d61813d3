"""Plans over what codecs leave: bytes as they are held, moved encoded, and values that do not depend on the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.exactness import Run, difference, run_training
from support.gpt import GPT, GPTConfig
from support.models import Made, llama
from support.planned import ROWS, WIDTH, Training, assert_equal, nothing
from tba import Offloader, offload_context
from tba._plan.no_plan import NoPlan
from tba._plan.plan import Plan

STEPS = 7

SLOWER = {"max_write_rate": "5MB", "max_read_rate": "5MB"}  # too slow for a step beside which others compute, too


SIZES = {"vocab": 64, "width": 64, "inner": 176, "layers": 4}
# A small model of language, and what it is called with for tokens that are the labels too.
LANGUAGE: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Any]]] = {
    "gpt": (
        lambda: GPT(GPTConfig(vocab=64, sequence=64, width=64, heads=4, layers=4, dropout=0.1)),
        lambda tokens: (tokens[:, :-1], tokens[:, 1:]),
    ),
    "llama": (
        lambda: llama(**SIZES, attention_dropout=0.1),
        lambda tokens: {"input_ids": tokens, "labels": tokens},
    ),
}
plans: list[Plan | NoPlan] = []  # of every step of the last training


def train(kind: str, make: Callable[[nn.Module], Offloader] | None) -> tuple[Run, list[Offloader]]:
    """A training, and its engine."""
    plans.clear()
    made: list[Offloader] = []

    @contextmanager
    def context(model: nn.Module) -> Iterator[None]:
        if make is not None and not made:
            made.append(make(model))
        with made[0] if made else nothing():
            yield
        plans.extend(offload.plan for offload in made)

    make_model, batch_of = LANGUAGE[kind]
    run = run_training(
        make_model,
        lambda: batch_of(torch.randint(64, (8, 65))),
        steps=STEPS,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        context=context,
        backward_inside=True,
    )
    return run, made


def held_bytes(kind: str, auto: Callable[..., Offloader], compress: str) -> int:
    """Bytes that a step holds where all has room."""
    offload = train(kind, lambda model: auto(model, memory_budget="1GiB", compress=compress))[1][0]
    stats = offload.stats()
    return stats.held_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize(("share", "rates"), [(0.7, SLOWER), (0.45, {})], ids=["slow", "fast"])
def test_exact_codecs_are_planned_with_and_change_no_bit(
    auto: Callable[..., Offloader], kind: str, share: float, rates: dict[str, str]
) -> None:
    budget = int(share * held_bytes(kind, auto, "exact"))
    ours, (offload,) = train(kind, lambda model: auto(model, memory_budget=budget, compress="exact", **rates))
    made, stats = [plan for plan in plans if plan], offload.stats()
    ours.assert_equals(train(kind, None)[0])
    measured = [plan.measured for plan in made if plan.measured is not None]
    assert measured  # a plan that the last step has made is still to be carried out
    assert max(each.peak_bytes for each in measured) <= budget
    plan = made[-1]
    assert plan.sends or plan.recomputed
    assert stats.packed_bytes < stats.encoded_bytes
    assert stats.derived_bytes
    assert "before codecs" in str(plan)
    # What others give again has no bytes to move, but those of its own where its block runs again.
    derived = [each for each in plan.facts.saved if not each.nbytes]
    assert derived
    assert all(each.replayed_bytes > 0 and each.place not in plan.sends for each in derived)
    if rates:
        assert any(plan.recomputed for plan in made)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_what_a_lossy_preset_loses_does_not_depend_on_the_plan(
    auto: Callable[..., Offloader], scratch: Path, kind: str
) -> None:
    budget = int(0.6 * held_bytes(kind, auto, "safe8"))
    ours, (offload,) = train(kind, lambda model: auto(model, memory_budget=budget, compress="safe8"))
    plan, measured = offload.plan, [each.measured for each in plans if each and each.measured is not None]
    nvme = {"storage_paths": scratch, "min_tensor_bytes": 4096, "prefetch_bytes": 0}
    theirs, (other,) = train(kind, lambda model: offload_context(model, "nvme", compress="safe8", **nvme))
    other.close()
    ours.assert_equals(theirs)
    assert difference(ours.gradients, train(kind, None)[0].gradients)
    assert measured
    assert max(each.peak_bytes for each in measured) <= budget
    assert plan
    assert plan.sends
    assert not plan.recomputed
    assert {block.why_not for block in plan.facts.blocks} == {
        "under a lossy preset its gradients would depend on the plan"
    }
    assert sum(plan.sends.values()) < sum(each.replayed_bytes for each in plan.facts.saved if each.place in plan.sends)


def test_a_codec_may_leave_other_bytes_than_before(auto: Callable[..., Offloader]) -> None:
    """Values decide how many bytes an exact codec leaves: the plan follows, and no step departs from it for that."""
    most = [2]

    def pick(self: Any, x: Tensor) -> Tensor:
        return x + 0.1 * self.linear(torch.take(x, torch.randint(most[0], x.shape)))

    def picks() -> nn.Module:
        return Made(pick, linear=nn.Linear(WIDTH, WIDTH))

    def run(training: Training, offload: Offloader | None) -> list[Tensor]:
        for number in range(12):
            most[0] = ROWS * WIDTH if number > 6 else 2
            with offload if offload is not None else nothing():
                training.step(number=number)
            if offload is not None and offload.plan:
                held.append(offload.plan.facts.saved_bytes)
        return training.state()

    held: list[int] = []
    training = Training(picks)
    offload = auto(training.model, memory_budget=1 << 20, compress="exact")
    assert_equal(run(training, offload), run(Training(picks), None))
    assert len(set(held)) > 1
    assert held[-1] > held[0]
