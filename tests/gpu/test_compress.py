"""On a GPU: codecs wait for nothing in forward, and for another stream's memory; projections train there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.exactness import gradients_of
from support.gpu import DEVICE, card, gpu_only, leaf_of, offloader
from support.models import Mixed
from tba import OffloadConfig, Offloader

pytestmark = [*gpu_only, pytest.mark.usefixtures("device")]


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
    del mask
    offload.flush()  # it is packed, and only the graph had it
    taken = [torch.zeros_like(expected) for _ in range(8)]  # the mask's memory among it, if it were free
    with card.stream(other):
        y.sum().backward()
    card.synchronize()
    del taken
    assert torch.equal(back[0], expected)
    assert offload.stats().packed_bytes == expected.numel() // 8
    offload.close()


def test_a_graph_dropped_before_the_device_answers_gives_all_memory_back(scratch: Path) -> None:
    with offloader("keep", scratch, compress="exact") as offload:
        leaf = leaf_of()
        with offload:
            card._sleep(1_000_000_000)  # half a second, in which nobody can tell whether tensors may be recomputed
            y = (leaf * 1).sin().square().sin().square()
            waits = (leaf + 1) * 2  # another operator begins: the others have finished
        assert offload.stats().live_records > 1
        del y, waits
        assert offload.stats().live_records == 0


def test_projected_linear_layers_train(scratch: Path) -> None:
    model, ids = Mixed().to(DEVICE), torch.randint(0, 50, (8, 256), device=DEVICE)
    plain, _ = gradients_of(model, ids, None, steps=3, flush=False)
    config = OffloadConfig(tier="cpu", compress="compact", min_tensor_bytes=0, storage_paths=scratch)
    ours, stats = gradients_of(model, ids, Offloader(model, config), steps=3, flush=True)
    assert stats is not None
    assert stats.errors == 0
    assert len(ours) == len(plain)


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


def test_flush_writes_what_a_codec_has_not_seen_the_values_of(scratch: Path) -> None:
    model = Mixed().to(DEVICE)
    ids = torch.randint(0, 50, (8, 256), device=DEVICE)
    config = OffloadConfig(tier="nvme", compress="exact", min_tensor_bytes=0, prefetch_bytes=0, storage_paths=scratch)
    offload = Offloader(model, config)
    for _ in range(2):  # the first step compares derivations, which waits
        with offload:
            card._sleep(100_000_000)
            loss = model(ids)
            offload.flush()
        before = offload.stats().forwarded_bytes
        loss.backward()
        assert offload.stats().forwarded_bytes - before <= loss.nbytes
    offload.close()
