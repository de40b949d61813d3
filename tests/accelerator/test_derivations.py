"""Derivations on a device: what its own clock says that they take, and what they give."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from support.engine import parts_of
from support.exactness import assert_bit_equal
from support.gpu import DEVICE, gpu_only, leaf_of, offloader

pytestmark = gpu_only


def net(x: Tensor) -> Tensor:
    for _ in range(12):
        x = torch.nn.functional.gelu(torch.nn.functional.silu(x * 1.0) * 2.0)
    return x.sum()


def test_derivations_are_timed_by_the_device_and_change_no_bit(scratch: Path) -> None:
    expected = torch.autograd.grad(net(leaf := leaf_of(elements=1 << 14)), leaf)[0]
    with offloader("nvme", scratch, compress="exact") as offload:
        for _ in range(3):
            leaf.grad = None
            with offload:
                loss = net(leaf)
            offload.flush()
            loss.backward()
            assert_bit_equal(leaf.grad, expected)
        worth = parts_of(offload).worth
        assert worth.derived_bytes > 0
        assert 0 < worth.derive_s < 60
    assert leaf.grad is not None
    assert leaf.grad.device == DEVICE
