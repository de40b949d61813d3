"""Manners: how an Offloader describes itself, and what it adds to errors in which PyTorch gives no remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.engine import activation, chain, engine
from tba import attach, offload_context

REFUSED = "don't yet support saved tensor hooks"
# Forward-mode transforms script a few functions when they are first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def square(x: Tensor) -> Tensor:
    return (x * x).sum()


@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "hessian"])
def test_a_transform_that_refuses_hooks_is_told_how_to_lift_ours(transform: str) -> None:
    x = torch.ones(3)

    def call() -> object:
        of = getattr(torch.func, transform)
        return of(square, x) if transform == "vjp" else of(square)(x)

    with offload_context(tier="keep") as offload:
        with offload.suspend():
            call()
        with pytest.raises(RuntimeError, match=REFUSED) as caught, offload:  # entered twice, said once
            call()
        with pytest.raises(RuntimeError, match=REFUSED), offload:
            raise caught.value
    (note,) = caught.value.__notes__
    assert "`with offload.suspend():`" in note


def test_an_attached_models_own_transform_is_told_too() -> None:
    class Penalty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gradient: Tensor = torch.func.grad(square)(x)
            return gradient

    model = nn.Sequential(Penalty())
    offload = attach(model, tier="keep")
    with pytest.raises(RuntimeError, match=REFUSED) as caught:
        model(torch.ones(3))
    assert ["suspend()" in note for note in caught.value.__notes__] == [True]
    offload.close()


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError) as caught, offload_context(tier="keep"):
        torch.ones(3) @ torch.ones(2)
    assert not hasattr(caught.value, "__notes__")


def test_transforms_that_take_hooks_need_no_suspension() -> None:
    x = torch.ones(2, 3)
    with offload_context(tier="keep"):
        assert torch.func.vmap(square)(x).tolist() == [3, 3]
        assert torch.func.jvp(square, (x,), (x,))[1].item() == 12


def test_an_offloader_tells_its_tier_and_its_state(scratch: Path) -> None:
    with engine(scratch) as offload:
        assert repr(offload) == "<Offloader tier='nvme' not entered, 0 steps, 0 B offloaded>"
        leaf, x = activation(1 << 18)
        with offload:
            y = chain(x, 3)
            assert repr(offload) == "<Offloader tier='nvme' entered, 0 steps, 3.0 MiB offloaded>"
        y.sum().backward()
        offload.stats()
        assert repr(offload) == "<Offloader tier='nvme' not entered, 1 step, 3.0 MiB offloaded>"
    assert repr(offload) == "<Offloader tier='nvme' closed, 1 step, 3.0 MiB offloaded>"
    assert leaf.grad is not None
