"""Pipeline schedules of torch.distributed.pipelining: stages of a model on two ranks, also over sharded weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from support.ranks import BLOCKS, Llama, Step, assert_exact, batch, loss_of, process_group
from tba import Offloader

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

MICRO_BATCHES = 4
RANKS = 2


class Stage(nn.Module):
    """The blocks of one stage, with the embedding before the first and the head after the last."""

    def __init__(self, number: int, stages: int) -> None:
        super().__init__()
        model, length = Llama(), BLOCKS // stages
        self.embed = model.embed if number == 0 else nn.Identity()
        self.blocks = model.blocks[number * length : (number + 1) * length]
        self.head = nn.Sequential(model.norm, model.head) if number == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


# Of the stages on a rank: their numbers.
Places = Callable[[int], tuple[int, ...]]


def _one(rank: int) -> tuple[int, ...]:
    return (rank,)


def _looped(rank: int) -> tuple[int, ...]:
    return rank, rank + RANKS


def _there_and_back(rank: int) -> tuple[int, ...]:
    return rank, 2 * RANKS - 1 - rank


SCHEDULES: dict[str, Places] = {
    "GPipe": _one,
    "1F1B": _one,
    "Interleaved1F1B": _looped,
    "InterleavedZeroBubble": _looped,
    "ZBVZeroBubble": _there_and_back,
}


def _pipeline(
    schedule: str, group: Any, prepare: Callable[[nn.Module], None]
) -> tuple[nn.Module, Callable[[Offloader | None], Step]]:
    """The stages of this rank, and the maker of their steps."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    rank = dist.get_rank(group)
    numbers = SCHEDULES[schedule](rank)
    count = RANKS * len(numbers)
    modules = nn.ModuleList(Stage(number, count) for number in numbers)
    for module in modules:
        prepare(module)
    stages = [
        PipelineStage(module, number, count, torch.device("cpu"), group=group)
        for module, number in zip(modules, numbers, strict=True)
    ]
    runner = get_schedule_class(schedule)(
        stages if len(stages) > 1 else stages[0],  # type: ignore[arg-type]
        MICRO_BATCHES,
        loss_fn=loss_of,
    )

    def step(number: int) -> list[Tensor]:
        tokens, losses = batch(number), list[Tensor]()
        last = count - 1 in numbers
        output = runner.step(*([tokens] if 0 in numbers else []), target=tokens if last else None, losses=losses)
        return [*losses, *([output] if last else [])]

    def make(offload: Offloader | None) -> Step:
        if offload is not None:
            for module in modules:  # what a stage saves is all written when its backward comes
                module.register_forward_hook(lambda *_: offload.flush())
        return step

    return modules, make


def _nothing(module: nn.Module) -> None:
    pass


def _two_ranks(rank: int, folder: str) -> None:
    with process_group(rank, RANKS, folder):
        for schedule in SCHEDULES:
            try:
                stats, _ = assert_exact(lambda name=schedule: _pipeline(name, None, _nothing), Path(folder))
                assert stats.weight_bytes > 0
            except BaseException as error:
                error.add_note(schedule)
                raise


def test_pipeline_schedules_are_exact(scratch: Path) -> None:
    mp.spawn(_two_ranks, (str(scratch),), nprocs=RANKS)


def _four_ranks(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with process_group(rank, 2 * RANKS, folder):
        mesh = init_device_mesh("cpu", (RANKS, 2), mesh_dim_names=("pipeline", "data"))

        def shard(stage: nn.Module) -> None:
            for each in (*stage.blocks, stage):  # type: ignore[misc]
                fully_shard(each, mesh=mesh["data"])

        stats, _ = assert_exact(lambda: _pipeline("1F1B", mesh.get_group("pipeline"), shard), Path(folder))
        assert stats.weight_bytes > 0


def test_a_pipeline_of_sharded_stages_is_exact(scratch: Path) -> None:
    mp.spawn(_four_ranks, (str(scratch),), nprocs=2 * RANKS)
