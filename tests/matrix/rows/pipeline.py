"""Pipeline: the schedules of torch.distributed.pipelining, over two ranks with one stage or two on each."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import cross_entropy

from matrix.arms import Arm, batches
from tba import attach, offload_context

VOCABULARY, BATCH, MICRO_BATCHES, BLOCKS = 96, (4, 70), 4, 4


def gpipe(arm: Arm) -> None:
    """Pipeline (GPipe), 2 ranks"""
    _train(arm, "GPipe", [dist.get_rank()])


def one_forward_one_backward(arm: Arm) -> None:
    """Pipeline (1F1B), 2 ranks"""
    _train(arm, "1F1B", [dist.get_rank()])


def interleaved(arm: Arm) -> None:
    """Pipeline (interleaved 1F1B), 2 ranks"""
    _train(arm, "Interleaved1F1B", [dist.get_rank(), dist.get_rank() + 2])


def zero_bubble(arm: Arm) -> None:
    """Pipeline (interleaved, zero-bubble), 2 ranks"""
    _train(arm, "InterleavedZeroBubble", [dist.get_rank(), dist.get_rank() + 2])


def zero_bubble_v(arm: Arm) -> None:
    """Pipeline (zero-bubble V), 2 ranks"""
    _train(arm, "ZBVZeroBubble", [dist.get_rank(), 3 - dist.get_rank()])


def _train(arm: Arm, schedule: str, numbers: list[int]) -> None:
    """Train the stages with these numbers; each of several on a rank has a forward of its own: a context holds all."""
    count = dist.get_world_size() * len(numbers)
    torch.manual_seed(0)
    blocks = [_Block() for _ in range(BLOCKS)]
    ends = nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)
    model = nn.ModuleList(_stage(number, count, blocks, ends) for number in numbers)
    stages = [PipelineStage(m, n, count, torch.device("cpu")) for m, n in zip(model, numbers, strict=True)]
    runner = get_schedule_class(schedule)(stages if len(stages) > 1 else stages[0], MICRO_BATCHES, loss_fn=_loss)
    offload, around = None, nullcontext()
    if arm.settings is not None and len(stages) == 1:
        offload = attach(model[0], **arm.settings)
    elif arm.settings is not None:
        offload = around = offload_context(model, **arm.settings)
    arm.watch(offload, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    last = count - 1 in numbers
    for tokens in batches(VOCABULARY, BATCH):
        losses: list[Tensor] = []
        with around:
            runner.step(*([tokens] if 0 in numbers else []), target=tokens if last else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        arm.losses.append(sum(loss.item() for loss in losses))
    arm.end(model, close=True)


def _stage(number: int, count: int, blocks: list[nn.Module], ends: tuple[nn.Module, nn.Module]) -> nn.Sequential:
    """The blocks of one stage, with the embedding before the first and the head after the last."""
    length = BLOCKS // count
    inner = blocks[number * length : (number + 1) * length]
    first, last = ends
    return nn.Sequential(*([first] if number == 0 else []), *inner, *([last] if number == count - 1 else []))


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class _Block(nn.Module):
    """A feed-forward block with a residual connection, as a stage needs one input and one output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 160), nn.GELU(), nn.Linear(160, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)
