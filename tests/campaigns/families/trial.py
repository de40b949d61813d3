"""Trial: one family trained plain and under three budgets on a slow link, and how the gradients compare."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tba import BudgetError, Offloader, offload_context

from ..saved import Saved
from .catalog import Family, NotSmallError, check, loss_of, make_batch

SHARES = (0.6, 0.4, 0.25)  # of what a plain step saves
STEPS = 6
_LEAST_BYTES = 1024
_BYTES_PER_S = 3_000_000  # on so slow a link recomputing wins
_MOST_S = 1.0  # that all that a step saves may take to be written; a link for a model that saves more is faster

Step = dict[str, Tensor | None]  # gradients by name of the parameter, and the loss


@dataclass
class Arm:
    """What came of one budget.

    Attributes:
        share: the budget, of what a plain step saves.
        blocks, recomputed: how many there are, and how many recompute in the step that had most do so.
        moved_bytes: that the plans of all steps sent.
        why_not: how many blocks never recompute, by reason.
        refused: the words of a BudgetError: no plan meets the budget.
        difference: the first step that is not as plain's, or the error that plain does not raise.
    """

    share: float
    blocks: int = 0
    recomputed: int = 0
    moved_bytes: int = 0
    why_not: dict[str, int] = field(default_factory=dict)
    refused: str = ""
    difference: str = ""


@dataclass
class Outcome:
    """What came of a family: `verdict` is one of those of `VERDICTS`."""

    name: str
    verdict: str
    detail: str = ""
    arms: list[Arm] = field(default_factory=list)


BAD = ("differs", "raised", "hung", "crashed")
VERDICTS = ("equal", "refused", "not planned", "unsteady", "not small", *BAD)


def run_family(family: Family, directory: Path, seed: int = 0, shares: Sequence[float] = SHARES) -> Outcome:
    """Compare a family's training under budgets, of these shares of what a plain step saves, with plain training."""
    try:
        _seed(seed)
        check(family)
    except NotSmallError as reason:
        return Outcome(family.name, "not small", str(reason))
    nbytes = _saved_bytes(family, seed)
    plain: list[Step] = []
    _train(family, seed, lambda model: nullcontext(), plain)
    arms = [_run_arm(family, seed, directory, share, nbytes, plain) for share in shares]
    wrong = next((arm for arm in arms if arm.difference), None)
    if wrong is None:
        planned = any(arm.recomputed or arm.moved_bytes for arm in arms)
        refused = all(arm.refused for arm in arms)
        return Outcome(family.name, "equal" if planned else "refused" if refused else "not planned", "", arms)
    again: list[Step] = []
    _train(family, seed, lambda model: nullcontext(), again)
    if detail := _difference(again, plain):
        return Outcome(family.name, "unsteady", f"plain differs from plain: {detail}", arms)
    verdict = "raised" if wrong.difference.startswith("raised") else "differs"
    return Outcome(family.name, verdict, f"at {wrong.share:.0%}: {wrong.difference}", arms)


def _run_arm(family: Family, seed: int, directory: Path, share: float, nbytes: int, plain: list[Step]) -> Arm:
    rate = max(_BYTES_PER_S, int(nbytes / _MOST_S))
    settings: dict[str, Any] = {
        "memory_budget": int(share * nbytes),
        "storage_paths": directory,
        "min_tensor_bytes": _LEAST_BYTES,
        "max_write_rate": rate,
        "max_read_rate": rate,
    }
    made: list[Offloader] = []
    plans: list[Any] = []
    arm, ours = Arm(share), list[Step]()

    def context(model: nn.Module) -> Offloader:
        made.append(offload_context(model, "auto", **settings))
        plans.append(made[-1].plan)
        return made[-1]

    try:
        _train(family, seed, context, ours)
    except BudgetError as error:
        arm.refused = str(error)
    except Exception as error:
        arm.difference = f"raised in step {len(ours) + 1}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if made:
        plans.append(made[-1].plan)
        made[-1].close()
    for plan in filter(None, plans):
        arm.blocks = len(plan.facts.blocks)
        arm.recomputed = max(arm.recomputed, len(plan.recomputed))
        arm.moved_bytes += sum(plan.sends.values())
        for block in plan.facts.blocks:
            if block.replay_s is None:
                arm.why_not[block.why_not] = sum(each.why_not == block.why_not for each in plan.facts.blocks)
    if not arm.difference and (detail := _difference(ours, plain[: len(ours)])):
        arm.difference = f"{detail}; {arm.recomputed} of {arm.blocks} blocks recompute"
    return arm


def _train(
    family: Family, seed: int, context: Callable[[nn.Module], AbstractContextManager[Any]], steps: list[Step]
) -> None:
    """Train from a seed; add each step's gradients as it ends."""
    _seed(seed)
    model = family.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        batch = make_batch(family, model)
        with context(model):
            loss = loss_of(model(**batch))
            loss.backward()
        found: Step = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        steps.append({"the loss": loss.detach()} | found)
        optimizer.step()
        optimizer.zero_grad()


def _saved_bytes(family: Family, seed: int) -> int:
    _seed(seed)
    model = family.make_model()
    batch = make_batch(family, model)
    with Saved(model, _LEAST_BYTES) as saved:
        loss = loss_of(model(**batch))
    del loss
    return saved.nbytes


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def _difference(ours: list[Step], theirs: list[Step]) -> str:
    """Say where two trainings first differ, or ""."""
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True), 1):
        wrong = [name for name in other if not _same(mine[name], other[name])]
        if wrong:
            far = max(_far(mine[name], other[name]) for name in wrong) / max(map(_size, other.values()))
            return f"step {number}: {len(wrong)} of {len(other)} differ, by {far:.1g} of the largest; first {wrong[0]}"
    return ""


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _far(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        return float("inf")
    return float((one.detach() - other.detach()).abs().max().to_dense())


def _size(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.detach().abs().max().to_dense())
