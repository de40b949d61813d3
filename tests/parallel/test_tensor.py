"""Tensor and sequence parallelism over two ranks: DTensors are seen through, and nothing stays in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks._workload.llama import loss_of
from benchmarks._workload.parallel import sequence_parallel, tensor_parallel, with_dtensor_outputs
from support.ranks import Llama, assert_exact, batch, innermost, plain_step, process_group, start

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)


def weight_bytes(make: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of weights, and of everything, that one forward saves on this rank: an account of our own."""
    model, _ = make()
    storages = {part.untyped_storage().data_ptr() for p in model.parameters() for part in innermost(p.detach())}
    weights = everything = 0

    def pack(tensor: Any) -> Any:
        nonlocal weights, everything
        for part in innermost(tensor):
            part = part.trigger_wait() if hasattr(part, "trigger_wait") else part
            everything += part.nbytes
            weights += part.nbytes if part.untyped_storage().data_ptr() in storages else 0
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tokens = batch(0)
        loss_of(model(tokens), tokens)
    return weights, everything


def _two_ranks(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    with process_group(rank, 2, folder):
        mesh = init_device_mesh("cpu", (2,))
        for how in (tensor_parallel, with_dtensor_outputs, sequence_parallel):

            def make(how: Callable[..., None] = how) -> tuple[nn.Module, Any]:
                model = Llama()
                how(model, mesh)
                return model, plain_step(model)

            weights, everything = weight_bytes(make)
            for settings in ({}, {"compress": "exact"}):
                stats, _ = assert_exact(make, Path(folder), **settings)
                assert not stats.kept_by_reason or settings, (how, stats)
                assert "DTensor" not in stats.kept_by_reason, (how, stats)
                assert (stats.weight_bytes, stats.saved_bytes) == (3 * weights, 3 * everything), (how, stats)
            budget = stats.offloaded_bytes // 6  # half of what a step moves
            stats, _ = assert_exact(make, Path(folder), tier="auto", memory_budget=budget)
            assert "DTensor" not in stats.kept_by_reason, (how, stats)


@pytest.mark.slow
def test_tensor_parallel_training_is_exact_and_keeps_no_dtensor(scratch: Path) -> None:
    start(_two_ranks, str(scratch), ranks=2)
