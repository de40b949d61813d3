"""On a GPU, beside what `exact/` runs there: half precision, tier auto, and tensors of host and device in one graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.exactness import Run, assert_bit_equal, assert_through_file, raw_bytes, run_training
from support.gpu import DEVICE, gpu_only, offloader, plainly, take_what_is_free
from support.models import Looks
from support.zoo import FAMILIES, Family
from tba import Offloader, OffloadStats, offload_context

pytestmark = [*gpu_only, pytest.mark.usefixtures("device")]

STEPS = 3
GPT = FAMILIES[0]


def through(tier: str, scratch: Path, train: Callable[..., Run], plain: Run, **settings: int) -> OffloadStats:
    """The statistics of a training through the tier, which is `plain` to the bit."""
    made: list[Offloader] = []

    def context(model: nn.Module) -> Offloader:
        made.append(offload_context(model, tier, min_tensor_bytes=0, storage_paths=scratch, **settings))
        return made[-1]

    moved = train(context=context, between=lambda: made[0].flush())
    stats = made[0].stats()
    made[0].close()
    moved.assert_equals(plain)
    return stats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_training_in_half_precision_is_exact(dtype: torch.dtype, scratch: Path) -> None:
    train = partial(run_training, lambda: GPT.make_model().to(dtype), GPT.make_batch, device=DEVICE)
    assert_through_file(through("nvme", scratch, train, plainly(train, DEVICE)))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_auto_moves_what_does_not_fit_and_nothing_else(family: Family, autocast: bool, scratch: Path) -> None:
    train = partial(run_training, family.make_model, family.make_batch, steps=STEPS, autocast=autocast, device=DEVICE)
    plain = plainly(train, DEVICE)
    fits = through("auto", scratch, train, plain)
    assert fits.saved_bytes > 0
    assert fits.offloaded_bytes == fits.written_bytes == fits.file_bytes == 0
    held_bytes = through("auto", scratch, train, plain, memory_budget=1 << 30).held_bytes
    stats = through("auto", scratch, train, plain, memory_budget=held_bytes * 7 // 10)
    assert stats.offloaded_bytes > 0
    assert stats.errors == 0


@pytest.mark.parametrize("tier", ["nvme", "cpu", "auto"])
def test_tensors_of_host_and_device_go_side_by_side(tier: str, scratch: Path) -> None:
    tensors = [torch.randn(3000), torch.randn(3000, device=DEVICE)]
    contents = [raw_bytes(t).cpu() for t in tensors]
    back: list[Tensor] = []
    with offloader(tier, scratch) as offload:
        with offload:
            y = Looks.apply(torch.ones(4, device=DEVICE, requires_grad=True), lambda _, *t: back.extend(t), *tensors)
        tensors.clear()
        offload.flush()
        take_what_is_free(DEVICE)
        y.sum().backward()
        assert [t.device.type for t in back] == ["cpu", DEVICE.type]
        for t, content in zip(back, contents, strict=True):
            assert_bit_equal(raw_bytes(t).cpu(), content)
        assert offload.stats().kept_bytes == (12000 if tier == "cpu" else 0)
