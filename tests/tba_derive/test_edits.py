"""Edits that leave no trace: what is derived gives the gradients of plain PyTorch, as each use is compared anew."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from support.engine import activation, engine
from support.exactness import equal

TOKENS, WIDTH = 32, 64

Edit = Callable[[Tensor, float], Any]


def by_numpy(h: Tensor, most: float) -> None:
    array = h.detach().numpy()
    array[...] = array.clip(max=most)


def by_another_data(h: Tensor, most: float) -> None:
    h.data = h.data.clamp(max=most)


def with_the_version_kept(h: Tensor, most: float) -> None:
    with torch.autograd._unsafe_preserve_version_counter(h), torch.no_grad():
        h.clamp_(max=most)


def of_one_element(h: Tensor, most: float) -> None:
    h.data.view(-1)[7].clamp_(max=most - 10)


def without_grad(h: Tensor, most: float) -> None:
    with torch.no_grad():
        h.clamp_(max=most)


EDITS: dict[str, Edit] = {
    "data": lambda h, most: h.data.clamp_(max=most),
    "another data": by_another_data,
    "numpy": by_numpy,
    "version kept": with_the_version_kept,
    "one element": of_one_element,
}


def edited(edit: Edit, most: float) -> Tensor:
    """The loss of what follows from a product that is edited before anybody has saved it."""
    x = activation(TOKENS, WIDTH)[1]
    weight = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).requires_grad_()
    h = functional.silu(x) * x
    edit(h, most)
    return functional.linear(h, weight).square().sum() + (weight * 2).sum()


def between_unsaved(edit: Edit, most: float) -> Tensor:
    """As `edited`, where the edit is of an operand that nobody saves: the sum."""
    x = activation(TOKENS, WIDTH)[1]
    weight = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).requires_grad_()
    between = functional.silu(x) * x + x
    edit(between, most)
    return functional.linear(-between, weight).square().sum()


def gradient(loss: Tensor) -> Tensor:
    """Of the leaf weight, wherever it is in the graph."""
    found: list[Tensor] = []
    stack, seen = [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        stack.extend(following for following, _ in node.next_functions)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, sorted(found, key=Tensor.numel))])


@pytest.mark.parametrize("tier", ["keep", "nvme"])
@pytest.mark.parametrize(
    ("program", "edit"),
    [*((edited, edit) for edit in EDITS), *((between_unsaved, edit) for edit in (*EDITS, "without grad"))],
)
def test_an_edit_that_changes_nothing_until_the_second_step(
    program: Callable[[Edit, float], Tensor], edit: str, tier: str, scratch: Path
) -> None:
    how = {**EDITS, "without grad": without_grad}[edit]
    limits = (1e9, 0.5, 1e9)
    wanted = [gradient(program(how, most)) for most in limits]
    assert not torch.equal(wanted[0], wanted[1])
    with engine(scratch, tier=tier, compress="exact") as offload:
        derived = []
        for most, plain in zip(limits, wanted, strict=True):
            with offload:
                loss = program(how, most)
            offload.flush()
            assert equal([gradient(loss)], [plain])
            derived.append(offload.stats().derived_bytes)
        del loss
    assert derived[0] > 0  # the step in which the edit did nothing, of what the edit was of


def normed(norm: nn.LayerNorm, head: nn.Linear, offload: Any, between: Callable[[], Any]) -> list[Tensor]:
    """Gradients of a step in which something happens between forward and backward."""
    leaf, x = activation(TOKENS, WIDTH)
    with offload:
        loss = head(norm(x)).square().sum()
    between()
    parameters = [leaf, *norm.parameters(), *head.parameters()]
    return list(torch.autograd.grad(loss, parameters))


@pytest.mark.parametrize("tier", ["keep", "nvme"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_weight_swapped_through_data_between_forward_and_backward(first: int, tier: str, scratch: Path) -> None:
    """As by averaged weights, or by an old optimizer with a second batch under way."""

    def run(offload: Any) -> list[list[Tensor]]:
        torch.manual_seed(0)
        norm, head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def swap() -> None:
            norm.weight.data.mul_(1.5)
            norm.bias.data = norm.bias.data + 0.25

        return [normed(norm, head, offload, swap if step >= first else lambda: None) for step in range(3)]

    wanted = run(nullcontext())
    with engine(scratch, tier=tier, compress="exact") as offload:
        for ours, theirs in zip(run(offload), wanted, strict=True):
            assert equal(ours, theirs)
        assert offload.stats().derived_bytes == 3 * TOKENS * WIDTH * 4  # the norm's result, from a copy of its weights


@pytest.mark.parametrize("kind", [nn.Parameter, lambda weight: weight.requires_grad_()])
def test_a_weight_too_large_to_copy_is_not_relied_on(kind: Callable[[Tensor], Tensor], scratch: Path) -> None:
    weight = kind(torch.rand(TOKENS, WIDTH))  # as large as what follows from it

    def run(offload: Any) -> list[Tensor]:
        leaf, x = activation(TOKENS, WIDTH)
        with offload:
            loss = (x * weight).square().sum()
        before = weight.data.clone()
        weight.data.mul_(3.0)
        found = torch.autograd.grad(loss, (leaf, weight))
        weight.data.copy_(before)
        return list(found)

    wanted = run(nullcontext())
    with engine(scratch, tier="keep", compress="exact") as offload:
        for _ in range(2):
            assert equal(run(offload), wanted)
        assert offload.stats().derived_bytes == 0


@pytest.mark.parametrize(("then", "derived"), [(2.0, 1), (-1e-3, 1), (0.037, 1), (1e-3, 2)])
def test_an_eps_changed_after_the_first_step(then: float, derived: int, scratch: Path) -> None:
    def run(offload: Any) -> list[list[Tensor]]:
        torch.manual_seed(0)
        norm, head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        found = []
        for eps in (1e-5, then):
            norm.eps = eps
            found.append(normed(norm, head, offload, lambda: None))
        return found

    wanted = run(nullcontext())
    with engine(scratch, tier="keep", compress="exact") as offload:
        for ours, theirs in zip(run(offload), wanted, strict=True):
            assert equal(ours, theirs)
        # An eps that nobody uses is not found, and the tensor stored.
        assert offload.stats().derived_bytes == derived * TOKENS * WIDTH * 4


@pytest.mark.parametrize("when", ["while it is compared", "afterwards"])
def test_a_weight_that_is_there_for_a_while_only(when: str, scratch: Path) -> None:
    """As FSDP gathers it: emptied after its use in forward, filled again before backward."""

    def run(offload: Any, *, empties: bool) -> list[Tensor]:
        torch.manual_seed(0)
        norm, head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        content, memory = norm.weight.detach().clone(), norm.weight.untyped_storage()
        nbytes = memory.nbytes()
        leaf, x = activation(TOKENS, WIDTH)
        with offload:
            out = head(norm(x))
            if empties and when == "while it is compared":
                memory.resize_(0)
            loss = out.square().sum()
            if empties:
                memory.resize_(0)
        memory.resize_(nbytes)
        norm.weight.data.copy_(content)
        return list(torch.autograd.grad(loss, [leaf, *norm.parameters(), *head.parameters()]))

    wanted = run(nullcontext(), empties=False)
    with engine(scratch, tier="keep", compress="exact") as offload:
        for _ in range(2):
            assert equal(run(offload, empties=True), wanted)
        derived = 2 if when == "afterwards" else 0
        assert offload.stats().derived_bytes == derived * TOKENS * WIDTH * 4


@pytest.mark.parametrize("tier", ["keep", "nvme"])
@pytest.mark.parametrize("used", [Tensor.detach, lambda weight: weight.data], ids=["detach", "data"])
def test_a_weight_that_is_used_detached_and_then_edited(
    used: Callable[[Tensor], Tensor], tier: str, scratch: Path
) -> None:
    """What is derived stands on no alias of a weight either, which no model tells of here."""

    def gradient(offload: Any) -> Tensor:
        weight, after = (
            nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH) * scale) for scale in (1.0, 2.0)
        )
        x = activation(WIDTH, WIDTH)[1]
        with offload if offload is not None else nullcontext():
            h = functional.silu(x * 1.0) * used(weight)
            loss = functional.linear(h, after).sum()
            del h
        if offload is not None:
            offload.flush()
        weight.data.mul_(1.5)
        loss.backward()
        assert after.grad is not None
        return after.grad

    expected = gradient(None)
    with engine(scratch, tier=tier, compress="exact") as offload:
        assert torch.equal(gradient(offload), expected)
