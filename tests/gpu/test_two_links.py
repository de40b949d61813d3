"""Two links: tier auto's host memory fills, the oldest of it goes on to disk, and plans foresee both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from io_backends import Buffer, PosixStore
from support.exactness import assert_bit_equal
from support.gpu import DEVICE, MIB, card, gpu_only, open_device
from support.models import Waves
from tba import Offloader, offload_context

pytestmark = gpu_only

LAYERS, NBYTES = 24, 2 * MIB


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    open_device()


def gradients(steps: int, offload: Offloader | None, model: nn.Module) -> list[Tensor]:
    x = torch.linspace(-1, 1, NBYTES // 4, device=DEVICE)
    found = []
    for _ in range(steps):
        model.zero_grad()
        if offload is None:
            model(x).backward()
        else:
            with offload:
                model(x).backward()
        assert model.scale.grad is not None
        assert isinstance(model.scale.grad, Tensor)
        found.append(model.scale.grad.clone())
    return found


@pytest.mark.parametrize("cpu_budget", ["8MiB", "32MiB", "1GiB"])
def test_a_small_budget_for_host_memory_is_filled_and_the_rest_goes_to_disk(
    cpu_budget: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled = []
    submit = PosixStore.submit_write

    def count(store: PosixStore, buffer: Buffer, *others: Any) -> Any:
        spilled.append(buffer.nbytes)
        return submit(store, buffer, *others)

    monkeypatch.setattr(PosixStore, "submit_write", count)
    plain = gradients(1, None, Waves(LAYERS, NBYTES).to(DEVICE))[0]
    model = Waves(LAYERS, NBYTES).to(DEVICE)
    settings = {"memory_budget": 16 * MIB, "min_tensor_bytes": 0, "storage_paths": scratch}
    offload = offload_context(model, cpu_budget=cpu_budget, **settings)
    for each in gradients(5, offload, model):
        assert_bit_equal(each, plain)
    card.synchronize()
    plan = offload.plan
    offload.close()
    assert plan
    assert plan.fits
    assert plan.facts.link.spill is not None
    assert not plan.recomputed
    if cpu_budget == "1GiB":
        assert not spilled
        assert not plan.predicted.spilled_bytes
    else:
        assert sum(spilled) >= NBYTES
        left_bytes = plan.predicted.moved_bytes - plan.facts.link.spill.host_bytes
        assert left_bytes <= plan.predicted.spilled_bytes <= left_bytes + NBYTES
