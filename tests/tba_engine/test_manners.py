"""Manners: how an Offloader describes itself, and what it adds to errors in which PyTorch gives no remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.engine import activation, chain, engine
from tba import offload_context


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError) as caught, offload_context(tier="keep"):
        torch.ones(3) @ torch.ones(2)
    assert not hasattr(caught.value, "__notes__")


def test_an_offloader_tells_its_tier_and_its_state(scratch: Path) -> None:
    with engine(scratch) as offload:
        assert repr(offload) == "<Offloader tier='nvme' not entered, 0 steps, 0 B written>"
        leaf, x = activation(1 << 18)
        with offload:
            y = chain(x, 3)
            assert repr(offload) == "<Offloader tier='nvme' entered, 0 steps, 0 B written>"
        y.sum().backward()
        offload.stats()
        assert repr(offload) == "<Offloader tier='nvme' not entered, 1 step, 0 B written>"
    assert repr(offload) == "<Offloader tier='nvme' closed, 1 step, 0 B written>"
    assert leaf.grad is not None
