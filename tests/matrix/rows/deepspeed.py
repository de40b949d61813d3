"""DeepSpeed: the stages of ZeRO on two ranks of CPU, with `tba.integrations.deepspeed`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from matrix.arms import Arm, batches, zero
from matrix.models import llama
from tba.integrations.deepspeed import initialize


def _train(arm: Arm, stage: int) -> None:
    model = llama()
    settings = {name: str(value) if name == "storage_paths" else value for name, value in (arm.settings or {}).items()}
    config = zero(stage) | ({"tba": settings} if settings else {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    arm.watch(engine.offload, model)
    if stage == 3:
        arm.shapes |= {tuple(parameter.ds_shape) for parameter in model.parameters()}
    for tokens in batches(90, (3, 70), seed=dist.get_rank()):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        arm.losses.append(loss.item())
    if stage == 3:
        arm.weights = {n: p.ds_tensor.detach().clone() for n, p in model.named_parameters()}
        model = torch.nn.Module()
    arm.end(model, close=True)
    engine.destroy()


def zero0(arm: Arm) -> None:
    """DeepSpeed ZeRO-0, 2 ranks"""
    _train(arm, 0)


def zero1(arm: Arm) -> None:
    """DeepSpeed ZeRO-1, 2 ranks"""
    _train(arm, 1)


def zero2(arm: Arm) -> None:
    """DeepSpeed ZeRO-2, 2 ranks"""
    _train(arm, 2)


def zero3(arm: Arm) -> None:
    """DeepSpeed ZeRO-3, 2 ranks"""
    _train(arm, 3)
