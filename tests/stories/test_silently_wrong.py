"""What users reported of other offloaders as silently wrong gradients, provoked here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.engine import activation, engine, save
from support.exactness import assert_bit_equal


def test_square_transposes_come_back_as_themselves(scratch: Path, store_kind: str) -> None:
    """One storage, one shape, one dtype and one address: strides alone tell the two apart."""
    leaf, x = activation(64, 64)
    with engine(scratch, store_kind=store_kind) as offload:
        with offload:
            straight, turned = save(x), save(x.t())
        offload.flush()
        assert offload.stats().duplicate_bytes == x.nbytes
        weights = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        (straight * weights + turned * weights).sum().backward()
    assert leaf.grad is not None
    assert_bit_equal(leaf.grad, 2 * leaf.detach() * weights + (2 * leaf.detach().t() * weights).t())


def test_an_expanded_mask_is_stored_once_and_comes_back_expanded(scratch: Path) -> None:
    """A mask expanded over heads is written as large as it is, not heads times (a copy of the view would be)."""
    heads, length = 16, 64
    leaf, scores = activation(heads, length, length)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    with engine(scratch) as offload:
        with offload:
            masked = torch.where(mask.expand(heads, length, length), scores, torch.zeros(()))
        offload.flush()
        assert 0 < offload.stats().written_bytes <= 2 * 4096  # 4,096 bytes of mask, in whole pages
        masked.sum().backward()
    assert leaf.grad is not None
    assert_bit_equal(leaf.grad, mask.expand_as(leaf).float())


class Policy(nn.Module):
    """A model that first samples without gradients and then trains, as GRPO does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.filterwarnings("error")  # one of "moved nothing in its first step" too
def test_sampling_without_gradients_is_no_first_step(scratch: Path) -> None:
    def train(model: Policy, passes: int) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                for _ in range(passes):
                    model(x)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    torch.manual_seed(0)
    plain = train(Policy(), passes=5)
    torch.manual_seed(0)
    model = Policy()
    with engine(scratch, model=model, prefetch_bytes=0) as offload:
        with offload:
            moved = train(model, passes=5)
        stats = offload.stats()
    assert all(map(torch.equal, moved, plain))
    assert stats.steps == 3
    assert stats.offloaded_bytes > 0
    assert stats.last_step is not None
    assert stats.last_step.offloaded_bytes * 3 == stats.offloaded_bytes  # each step as much: sampling added nothing
