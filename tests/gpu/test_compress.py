"""On a GPU: what codecs make of saved tensors, without a wait in forward, and what backward then gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from compact import Preset
from support.engine import ALL_INT8
from support.exactness import equal, gradients_of
from support.gpu import DEVICE, card, gpu_only, open_device
from support.models import Mixed
from tba import OffloadConfig, Offloader, OffloadStats

pytestmark = gpu_only


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    open_device()


def train(tier: str | None, compress: str | Preset | None, scratch: Path) -> tuple[list[Tensor], OffloadStats | None]:
    torch.manual_seed(0)
    model = Mixed().to(DEVICE)
    ids = torch.randint(0, 50, (8, 256), device=DEVICE)
    offload = None
    if tier is not None:
        config = OffloadConfig(tier=tier, compress=compress, min_tensor_bytes=0, storage_paths=scratch)
        offload = Offloader(model, config)
    return gradients_of(model, ids, offload, steps=3, flush=tier in ("nvme", "cpu"))


@pytest.fixture(autouse=True)
def _same_kernels() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tier", ["keep", "cpu", "nvme", "auto"])
def test_exact_is_bit_equal_and_smaller(tier: str, scratch: Path) -> None:
    plain, _ = train(None, None, scratch)
    ours, stats = train(tier, "exact", scratch)
    assert equal(ours, plain)
    assert stats is not None
    assert 0 < stats.packed_bytes < 0.6 * stats.encoded_bytes
    assert stats.derived_bytes > 0
    assert (stats.live_records, stats.errors) == (0, 0)


def test_lossy_does_not_depend_on_the_tier(scratch: Path) -> None:
    plain, _ = train(None, None, scratch)
    first, _ = train("keep", ALL_INT8, scratch)
    assert not equal(first, plain)
    for a, b in zip(first, plain, strict=True):
        assert functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.99
    for tier in ("cpu", "nvme"):
        assert equal(train(tier, ALL_INT8, scratch)[0], first)


def test_projected_linear_layers(scratch: Path) -> None:
    plain, _ = train(None, None, scratch)
    ours, stats = train("cpu", "compact", scratch)
    assert stats is not None
    assert stats.errors == 0
    assert len(ours) == len(plain)


class Masked(torch.autograd.Function):
    """x where the mask, whose kernel starts late; saves the mask alone, which its backward puts into `back`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, back: list[Tensor]) -> Tensor:
        card._sleep(100_000_000)  # a twentieth of a second
        ctx.save_for_backward(mask)
        ctx.back = back
        return x * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        ctx.back.append(mask)
        return gradients[0] * mask, None, None


def test_memory_of_another_stream_outlives_the_codec_that_reads_it(scratch: Path) -> None:
    here, other, back = card.current_stream(), card.Stream(), list[Tensor]()
    x = torch.ones(1 << 20, device=DEVICE, requires_grad=True)
    mask = torch.rand(1 << 20, device=DEVICE) > 0.5
    expected = mask.clone()
    config = OffloadConfig(tier="keep", compress="exact", min_tensor_bytes=0, storage_paths=scratch)
    offload = Offloader(None, config)
    other.wait_stream(here)
    with card.stream(other), offload:
        y = Masked.apply(x, mask, back)
    assert isinstance(y, Tensor)
    del mask  # packed, and only the graph had it
    taken = [torch.zeros_like(expected) for _ in range(8)]  # the mask's memory among it, if it were free
    with card.stream(other):
        y.sum().backward()
    card.synchronize()
    del taken
    assert torch.equal(back[0], expected)
    assert offload.stats().packed_bytes == expected.numel() // 8
    offload.close()


def test_forward_does_not_wait_for_the_device(scratch: Path) -> None:
    """While the device is busy for long, forward returns: codecs that look at values do so later."""
    model = Mixed().to(DEVICE)
    ids = torch.randint(0, 50, (8, 256), device=DEVICE)
    config = OffloadConfig(tier="keep", compress="exact", min_tensor_bytes=0, storage_paths=scratch)
    offload = Offloader(model, config)
    for _ in range(2):  # the first step compares derivations, which waits
        with offload:
            model(ids).backward()
    card.synchronize()
    card._sleep(2_000_000_000)
    busy = card.Event()
    busy.record()
    with offload:
        loss = model(ids)
    assert not busy.query()
    loss.backward()
    offload.close()
