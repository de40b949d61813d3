"""What TRL and torchtune test of their own offloading and no other test of ours asks; docs/stories.md has the rest.

Theirs: tests/test_activation_offloading.py of TRL, tests/torchtune/training/test_activation_offloading.py of torchtune.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.engine import activation, engine, save
from support.exactness import assert_bit_equal
from support.models import Looks


def test_what_is_smaller_than_the_least_size_stays(scratch: Path) -> None:
    leaf, x = activation(2, 1000)
    with engine(scratch, min_tensor_bytes=1000) as offload:
        with offload:
            small, large = save(x[:, :5] * 1), save(x * 1)
        offload.flush()
        stats = offload.stats()
        (small.sum() + large.sum()).backward()
    assert stats.offloaded_bytes == x.nbytes
    assert stats.kept_by_reason == {"below min_tensor_bytes": 2 * 5 * 4}
    expected = 2 * leaf.detach()
    expected[:, :5] *= 2
    assert_bit_equal(leaf.grad, expected)


class GivesAView(torch.autograd.Function):
    """Its gradient is a view of what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.t())
        return x.new_zeros(2, 4)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        turned: Tensor = saved.t()
        return turned


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 30], ids=["no read-ahead", "read-ahead"])
def test_a_gradient_that_is_a_view_of_what_was_unpacked_stays_as_it_is(prefetch_bytes: int, scratch: Path) -> None:
    """Its memory is not given to what is unpacked next, for as long as the view lives."""
    seen: list[bool] = []

    def look(gradient: Tensor, _: Tensor) -> None:
        seen.append(bool((gradient == 1).all()))

    leaf = torch.ones(256, 1024, requires_grad=True)
    with engine(scratch, prefetch_bytes=prefetch_bytes) as offload:
        for _ in range(3):  # the order is learned
            with offload:
                x: Any = leaf
                for _ in range(6):
                    x = Looks.apply(x, look, torch.full_like(x, 5))
                loss = GivesAView.apply(x).sum()
            offload.flush()
            loss.backward()
        assert offload.stats().read_bytes >= 3 * 7 * leaf.nbytes
    assert seen == [True] * 18
    assert_bit_equal(leaf.grad, torch.full_like(leaf, 3))
