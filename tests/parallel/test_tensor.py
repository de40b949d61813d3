"""Tensor and sequence parallelism, alone and with FSDP2: DTensors are seen through, and nothing stays in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from support.ranks import Llama, assert_exact, batch, innermost, loss_of, plain_step, process_group

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)


def tensor_parallel(model: nn.Module, mesh: Any, *, local: bool = True) -> None:
    """Attention and feed-forward over the ranks; `local`: plain tensors between the layers of a block."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    wide = {name: ColwiseParallel(use_local_output=local) for name in ("feed_forward.gate", "feed_forward.up")}
    attention = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    ends = {"attention.o": RowwiseParallel(), "feed_forward.down": RowwiseParallel()}
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, {**attention, **wide, **ends})


def with_dtensor_outputs(model: nn.Module, mesh: Any) -> None:
    """Activations between the layers of a block are DTensors."""
    tensor_parallel(model, mesh, local=False)


def sequence_parallel(model: nn.Module, mesh: Any) -> None:
    """As in torchtitan: norms, dropout and what lies between the blocks are sharded by position."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    top = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, top)
    for block in model.blocks:  # type: ignore[union-attr]
        plan: dict[str, Any] = {"first": SequenceParallel(), "second": SequenceParallel()}
        plan |= {"attention": whole, "feed_forward": whole}
        plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o", "feed_forward.down")}
        parallelize_module(block, mesh, plan)


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


def test_tensor_parallel_training_is_exact_and_keeps_no_dtensor(scratch: Path) -> None:
    mp.spawn(_two_ranks, (str(scratch),), nprocs=2)


def _four_ranks(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with process_group(rank, 4, folder):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        for how in (tensor_parallel, sequence_parallel):

            def make(how: Callable[..., None] = how) -> tuple[nn.Module, Any]:
                model = Llama()
                how(model, mesh["tensor"])
                for each in (*model.blocks, model):
                    fully_shard(each, mesh=mesh["data"])
                return model, plain_step(model)

            stats, _ = assert_exact(make, Path(folder))
            assert not stats.kept_by_reason, (how, stats)
            assert stats.weight_bytes > 0


def test_fsdp2_over_tensor_parallel_is_exact_and_keeps_no_dtensor(scratch: Path) -> None:
    mp.spawn(_four_ranks, (str(scratch),), nprocs=4)
