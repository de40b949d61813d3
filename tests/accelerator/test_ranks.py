"""Two ranks, each with an accelerator: data-parallel training is exact, and weights are left alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from support import accelerator
from support.ranks import Llama, Step, assert_exact, plain_step, process_group, start
from tba import Offloader

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    for block in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(block, mesh=mesh)
    return model


Wrap = Callable[[nn.Module], nn.Module]


def _make(wrap: Wrap, device: torch.device) -> tuple[nn.Module, Callable[[Offloader | None], Step]]:
    model = wrap(Llama().to(device))
    return model, plain_step(model)


def _rank_main(rank: int, folder: str) -> None:
    from support import staged

    accelerator.load()
    device = torch.device("sim", 0)
    staged.register(device)
    with process_group(rank, 2, folder, "staged"):
        for wrap in (_ddp, _fsdp2):
            # FSDP2 frees gradients of its own stream while the optimizer reads them on another, and has that stream
            # wait before it uses the memory again. That is right, as bytes stay until then; poison comes at once.
            accelerator.configure(delay_s=0.0002, seed=rank, poison=wrap is _ddp)
            for tier in ("nvme", "cpu"):
                try:
                    stats, _ = assert_exact(partial(_make, wrap, device), Path(folder), tier=tier)
                    assert stats.weight_bytes > 0
                except BaseException as error:
                    error.add_note(f"{wrap.__name__}, {tier}")
                    raise


@pytest.mark.exhaustive
def test_two_ranks_with_a_device_each_are_exact(scratch: Path) -> None:
    if reason := accelerator.why_not():
        pytest.skip(reason)
    accelerator.build.build()  # once, and not in each rank
    start(_rank_main, str(scratch), ranks=2)
