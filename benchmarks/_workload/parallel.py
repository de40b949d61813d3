"""Ways to spread the small Llama over ranks: sharded, tensor- and sequence-parallel, and as stages of a pipeline.

A `Wrap` takes the model and a mesh of ranks, changes the model, and returns what is to be trained instead, if that is
another. Importing this needs `torch.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from .llama import Attention, Block, FeedForward, Llama, LlamaSizes, loss_of

Wrap = Callable[[nn.Module, Any], nn.Module | None]


def _blocks(model: nn.Module) -> nn.Sequential:
    blocks = model.blocks  # of a Llama, or of one of its stages
    assert isinstance(blocks, nn.Sequential)
    return blocks


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

    for block in (*_blocks(model), model):
        fully_shard(block, mesh=mesh)


def parts_sharded(model: nn.Module, mesh: Any) -> None:
    """FSDP2 around attention and feed-forward: gathered and scattered within the block's forward."""
    from torch.distributed.fsdp import fully_shard

    for block in _blocks(model):
        for part in (block.attention, block.feed_forward):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module, mesh: Any, *, local: bool = True) -> None:
    """Attention and feed-forward over the ranks; `local`: plain tensors between the layers of a block."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    wide = {name: ColwiseParallel(use_local_output=local) for name in ("feed_forward.gate", "feed_forward.up")}
    attention = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    ends = {"attention.o": RowwiseParallel(), "feed_forward.down": RowwiseParallel()}
    for block in _blocks(model):
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
    for block in _blocks(model):
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


class Stage(nn.Module):
    """The blocks of one stage, with the embedding before the first and the head after the last."""

    def __init__(self, number: int, stages: int, sizes: LlamaSizes) -> None:
        super().__init__()
        model, length = Llama(sizes), sizes.layers // stages
        self.embed = model.embed if number == 0 else nn.Identity()
        self.blocks = model.blocks[number * length : (number + 1) * length]
        self.head = nn.Sequential(model.norm, model.head) if number == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.embed(x)))
        return out


class Pipeline:
    """One rank of a pipeline, which has one stage of it: a dimension of the mesh is the stages, another shards each.

    Args:
        sizes: of the whole model.
        mesh: with the dimensions "stage" and "data".
        micro_batches: of a step.

    Attributes:
        module: this rank's stage.
    """

    def __init__(self, sizes: LlamaSizes, mesh: Any, micro_batches: int) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        stages, number = mesh["stage"].size(), mesh.get_local_rank("stage")
        self.module = Stage(number, stages, sizes)
        blocks_sharded(self.module, mesh["data"])
        stage = PipelineStage(self.module, number, stages, torch.device("cpu"), group=mesh.get_group("stage"))
        self._schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss_of)
        self._first, self._last = number == 0, number == stages - 1

    def step(self, tokens: Tensor) -> Tensor:
        """Run forward and backward of all micro-batches; return their mean loss, which the last stage has, else 0."""
        losses: list[Tensor] = []
        self._schedule.step(*([tokens] if self._first else []), target=tokens if self._last else None, losses=losses)
        return torch.stack(losses).mean() if losses else torch.zeros(())
