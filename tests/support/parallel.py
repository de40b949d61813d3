"""Parallel: the small Llama over ranks: spread over a mesh, and as stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._workload.llama import loss_of
from benchmarks._workload.parallel import Stage, Wrap
from support.ranks import SIZES, Llama, Step, batch
from tba import Offloader

MICRO_BATCHES = 4
STAGES = 2  # ranks, each with one stage or two


# Of the stages on a rank: their numbers.
Places = Callable[[int], tuple[int, ...]]


def _one(rank: int) -> tuple[int, ...]:
    return (rank,)


def _looped(rank: int) -> tuple[int, ...]:
    return rank, rank + STAGES


def _there_and_back(rank: int) -> tuple[int, ...]:
    return rank, 2 * STAGES - 1 - rank


SCHEDULES: dict[str, Places] = {
    "GPipe": _one,
    "1F1B": _one,
    "Interleaved1F1B": _looped,
    "InterleavedZeroBubble": _looped,
    "ZBVZeroBubble": _there_and_back,
}
if torch.__version__.startswith("2.11."):  # there a rank with stages in a row sends to itself, which Gloo refuses
    del SCHEDULES["ZBVZeroBubble"]


def pipeline(
    schedule: str, group: Any, prepare: Callable[[nn.Module], None]
) -> tuple[nn.Module, Callable[[Offloader | None], Step]]:
    """The stages of this rank, and the maker of their steps."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    rank = dist.get_rank(group)
    numbers = SCHEDULES[schedule](rank)
    count = STAGES * len(numbers)
    modules = nn.ModuleList(Stage(number, count, SIZES) for number in numbers)
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


def maker(wrap: Wrap) -> Callable[[], nn.Module]:
    """Return what makes a model over both ranks; within their process group."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))

    def make() -> nn.Module:
        model = Llama()
        return wrap(model, mesh) or model

    return make
