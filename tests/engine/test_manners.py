"""Manners: how an Offloader describes itself, and what it adds to errors in which PyTorch gives no remedy."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.engine import activation, chain, engine
from tba import offload_context

# Forward-mode transforms script a few functions when they are first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def square(x: Tensor) -> Tensor:
    return (x * x).sum()


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError) as caught, offload_context(tier="keep"):
        torch.ones(3) @ torch.ones(2)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "hessian"])
def test_a_transform_needs_no_suspension_and_may_have_one(transform: str) -> None:
    x = torch.ones(2, 3)
    of = getattr(torch.func, transform)
    with offload_context(tier="keep") as offload:
        for region in (nullcontext(), offload.suspend()):
            with region:
                assert of(square, x) if transform == "vjp" else of(square)(x) is not None
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
