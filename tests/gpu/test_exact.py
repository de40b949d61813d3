"""On a GPU, beside what `exact/` runs there: half precision, tier auto, and tensors of host and device in one graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.exactness import Run, assert_bit_equal, assert_through_file, raw_bytes, run_training
from support.gpt import GPT, GPTConfig
from support.gpu import DEVICE, gpu_only, offloader, plainly, take_what_is_free
from support.models import Looks
from tba import Offloader, OffloadStats, offload_context

pytestmark = [*gpu_only, pytest.mark.usefixtures("device")]

BATCH, SEQUENCE, VOCAB = 4, 32, 61
STEPS = 3


def gpt() -> nn.Module:
    return GPT(GPTConfig(layers=2, width=64, heads=2, sequence=SEQUENCE, vocab=VOCAB, dropout=0.1))


def text() -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCAB, (BATCH, SEQUENCE)), torch.randint(0, VOCAB, (BATCH, SEQUENCE))


def through(tier: str, scratch: Path, plain: Run, dtype: torch.dtype = torch.float32, **settings: int) -> OffloadStats:
    """The statistics of a training through the tier, which is `plain` to the bit."""
    made: list[Offloader] = []

    def context(model: nn.Module) -> Offloader:
        made.append(offload_context(model, tier, min_tensor_bytes=0, storage_paths=scratch, **settings))
        return made[-1]

    moved = run_training(
        lambda: gpt().to(dtype), text, context=context, between=lambda: made[0].flush(), steps=STEPS, device=DEVICE
    )
    stats = made[0].stats()
    made[0].close()
    moved.assert_equals(plain)
    return stats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_training_in_half_precision_is_exact(dtype: torch.dtype, scratch: Path) -> None:
    plain = plainly(lambda: run_training(lambda: gpt().to(dtype), text, steps=STEPS, device=DEVICE), DEVICE)
    assert_through_file(through("nvme", scratch, plain, dtype))


def test_auto_moves_what_does_not_fit_and_nothing_else(scratch: Path) -> None:
    plain = plainly(lambda: run_training(gpt, text, steps=STEPS, device=DEVICE), DEVICE)
    fits = through("auto", scratch, plain)
    assert fits.saved_bytes > 0
    assert fits.offloaded_bytes == fits.written_bytes == fits.file_bytes == 0
    kept_bytes = through("keep", scratch, plain).kept_bytes
    stats = through("auto", scratch, plain, memory_budget=kept_bytes * 85 // (100 * STEPS))
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
