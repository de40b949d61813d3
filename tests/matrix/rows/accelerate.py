"""Accelerate: a loop of one's own around `Accelerator.prepare`, with `tba.integrations.accelerate`."""

from __future__ import annotations

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState

from matrix.arms import Arm, Cannot, batches, zero
from matrix.models import llama
from tba.integrations.accelerate import attach


def _accelerator(kind: DistributedType, **given: object) -> Accelerator:
    AcceleratorState._reset_state()
    PartialState._reset_state()
    accelerator = Accelerator(**given)
    if accelerator.distributed_type != kind:
        raise Cannot(
            f"accelerate {accelerate.__version__} leaves this plugin aside on a CPU (its distributed type is "
            f"{accelerator.distributed_type.value})"
        )
    return accelerator


def _train(arm: Arm, accelerator: Accelerator) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    offload = attach(accelerator, model, **arm.settings) if arm.settings is not None else None
    arm.watch(offload, model)
    for tokens in batches(90, (3, 70), seed=dist.get_rank()):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        arm.losses.append(loss.item())
    arm.end(model, close=True)


def ddp(arm: Arm) -> None:
    """accelerate, 2 ranks"""
    _train(arm, _accelerator(DistributedType.MULTI_CPU, cpu=True))


def fsdp2(arm: Arm) -> None:
    """accelerate with FSDP2, 2 ranks"""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    _train(arm, _accelerator(DistributedType.FSDP, cpu=True, fsdp_plugin=plugin))


def zero2(arm: Arm) -> None:
    """accelerate with DeepSpeed ZeRO-2, 2 ranks"""
    plugin = DeepSpeedPlugin(hf_ds_config=zero(2))
    _train(arm, _accelerator(DistributedType.DEEPSPEED, deepspeed_plugin=plugin))
