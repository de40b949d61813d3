"""Ways to spread the small Llama over ranks: sharded, tensor- and sequence-parallel.

Each takes the model and a mesh of ranks, changes the model, and returns what is to be trained instead, if that is
another. Importing this needs `torch.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from .llama import Attention, Block, FeedForward

Wrap = Callable[[nn.Module, Any], nn.Module | None]


def ddp(model: nn.Module, _: Any) -> nn.Module:
    """Replicated, gradients averaged."""
    return nn.parallel.DistributedDataParallel(model)


def fsdp1(model: nn.Module, _: Any, *, around: Collection[type[nn.Module]] = (Block,)) -> nn.Module:
    """FSDP around modules of some types."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy(around), use_orig_params=True, device_id=torch.device("cpu")
    )


def parts_in_fsdp1(model: nn.Module, mesh: Any) -> nn.Module:
    """FSDP around attention and feed-forward."""
    return fsdp1(model, mesh, around=(Attention, FeedForward))


def blocks_sharded(model: nn.Module, mesh: Any) -> None:
    """FSDP2 around each block."""
    from torch.distributed.fsdp import fully_shard

    for block in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(block, mesh=mesh)


def parts_sharded(model: nn.Module, mesh: Any) -> None:
    """FSDP2 around attention and feed-forward: gathered and scattered within the block's forward."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:  # type: ignore[union-attr]
        for part in (block.attention, block.feed_forward):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


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


def tensor_parallel_sharded(model: nn.Module, mesh: Any) -> None:
    """Tensor-parallel over the mesh's second dimension, each block sharded by FSDP2 over its first."""
    tensor_parallel(model, mesh["tensor"])
    blocks_sharded(model, mesh["data"])
