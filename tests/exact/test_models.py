"""Training with every activation through the tier is bit for bit plain training, for each family of models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.exactness import CPU, Observer, Run, assert_through_file, first_argument, run_training
from support.gpu import plainly, tiers_of
from support.zoo import FAMILIES, Family, add_low_rank
from tba import Offloader, offload_context

pytestmark = pytest.mark.parametrize("family", FAMILIES, ids=str)


def _compare(
    family: Family,
    scratch: Path,
    device: torch.device = CPU,
    make_model: Callable[[], nn.Module] | None = None,
    **how: Any,
) -> None:
    def train(**more: Any) -> Run:
        return run_training(make_model or family.make_model, family.make_batch, device=device, **how, **more)

    plain = plainly(train, device)
    for tier in tiers_of(device):
        offloads: list[Offloader] = []

        def context(model: nn.Module, tier: str = tier, offloads: list[Offloader] = offloads) -> Offloader:
            offloads.append(offload_context(model, tier=tier, min_tensor_bytes=0, storage_paths=scratch))
            return offloads[-1]

        moved = train(context=context, between=lambda offloads=offloads: offloads[-1].flush())
        offload = offloads[-1]
        assert all(one is offload for one in offloads)
        stats = offload.stats()
        offload.close()
        moved.assert_equals(plain)
        # A kernel may save a seed or a count that lives in host memory; tier "cpu" has nothing to gain by moving it.
        kept_because = ("already in host memory",) if tier == "cpu" else ()
        unread_bytes = 3 * how.get("forwards", 1) * family.unread_bytes
        assert_through_file(stats, kept_because=kept_because, unread_bytes=unread_bytes)
        assert stats.weight_bytes > 0


@pytest.mark.parametrize("backward", ["inside", "outside"])
def test_training_is_exact(family: Family, backward: str, device: torch.device, scratch: Path) -> None:
    _compare(family, scratch, device, backward_inside=backward == "inside")


def test_training_under_autocast_is_exact(family: Family, device: torch.device, scratch: Path) -> None:
    _compare(family, scratch, device, autocast=True)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_training_low_rank_adapters_is_exact(family: Family, autocast: bool, scratch: Path) -> None:
    _compare(family, scratch, make_model=lambda: add_low_rank(family.make_model()), autocast=autocast)


def test_two_forwards_before_two_backwards_are_exact(family: Family, scratch: Path) -> None:
    _compare(family, scratch, forwards=2)


def test_keeping_the_graph_is_exact(family: Family, scratch: Path) -> None:
    _compare(family, scratch, retain_graph=True)


@pytest.mark.parametrize("low_rank", [False, True], ids=["trained", "frozen"])
def test_no_byte_of_a_weight_is_moved(family: Family, low_rank: bool, scratch: Path) -> None:
    """By an account of our own: what autograd saves of the storages of parameters and buffers is left alone."""

    def make_model() -> nn.Module:
        model = family.make_model()
        return add_low_rank(model) if low_rank else model

    torch.manual_seed(7)
    model, batch = make_model().train(), family.make_batch()
    with Observer(model) as seen:
        first_argument(model, batch)
    torch.manual_seed(7)
    model, batch = make_model().train(), family.make_batch()
    with offload_context(model, tier="nvme", min_tensor_bytes=0, storage_paths=scratch) as offload:
        loss = first_argument(model, batch)
        offload.flush()
    stats = offload.stats()
    loss.backward()
    offload.close()
    assert stats.weight_bytes == seen.weight_bytes > 0
    assert stats.offloaded_bytes <= seen.saved_bytes - seen.weight_bytes
