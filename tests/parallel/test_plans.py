"""Plans of ranks: each rank plans for itself, and one that recomputes beside one that does not changes no gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.exactness import assert_bit_equal
from support.parallel import sequence_parallel, tensor_parallel, with_dtensor_outputs
from support.ranks import BLOCKS, Block, Llama, plain_step, process_group, start, train
from tba import offload_context

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

Wrap = Callable[[nn.Module, Any], nn.Module | None]


def _ddp(model: nn.Module, _: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp1(model: nn.Module, _: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
    )


def _blocks_sharded(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(block, mesh=mesh)


def _parts_of_blocks_sharded(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block.feed_forward, mesh=mesh)  # gathered and scattered in the block's forward
    fully_shard(model, mesh=mesh)


def _one_plans(rank: int, wrap: Wrap, communicates: bool, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    def make() -> nn.Module:
        model = Llama()
        return wrap(model, mesh) or model

    with process_group(rank, 2, folder):
        mesh = init_device_mesh("cpu", (2,))
        model = make()
        plain = train(model, plain_step(model)(None), nullcontext(), 4)
        model = make()
        budget = 300_000 if rank == 0 else 2**30  # rank 1 has room for everything: it watches, tries and plans nothing
        offload = offload_context(
            model, tier="auto", memory_budget=budget, min_tensor_bytes=0, storage_paths=folder, max_write_rate="1MB"
        )
        moved = train(model, plain_step(model)(offload), offload, 4)
        plan, stats = offload.plan, offload.stats()
        offload.close()
        assert_bit_equal(moved, plain, f"rank {rank}:")
        assert not stats.errors
        assert bool(plan) == (rank == 0)
        if plan:
            assert len(plan.facts.blocks) == BLOCKS
            assert {"communicates" in block.why_not for block in plan.facts.blocks} == {communicates}
            assert bool(plan.recomputed) != communicates


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "communicates"),
    [
        (_ddp, False),
        (_fsdp1, False),
        (_blocks_sharded, False),
        (_parts_of_blocks_sharded, True),
        (tensor_parallel, True),
        (with_dtensor_outputs, True),
        (sequence_parallel, True),
    ],
)
def test_a_rank_that_plans_alone_recomputes_only_what_does_not_communicate(
    wrap: Wrap, communicates: bool, scratch: Path
) -> None:
    start(_one_plans, str(scratch), wrap, communicates, ranks=2)
