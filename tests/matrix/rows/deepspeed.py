"""DeepSpeed: the stages of ZeRO on two ranks of CPU, with `tba.integrations.deepspeed`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed import zero as parameters_of

from benchmarks._workload.async_io import lacking_for_files
from matrix.arms import Arm, Lacking, batches, zero
from matrix.models import llama
from tba.integrations.deepspeed import initialize

# A rank's half of the embedding, and of the head, is then 1 MiB in bfloat16: DeepSpeed writes nothing smaller to files.
_WIDE = 1 << 14
# A model of float32 it would take for one of bfloat16 there.
_HALF = {"bf16": {"enabled": True}}


def _train(
    arm: Arm,
    stage: int,
    offloads: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
    vocabulary: int = 96,
) -> None:
    """Train by a stage of ZeRO, which `offloads` states as well; `own` are other sections of DeepSpeed's."""
    model = llama(vocabulary)
    settings = {name: str(value) if name == "storage_paths" else value for name, value in (arm.settings or {}).items()}
    config = zero(stage) | ({"tba": settings} if settings else {}) | (own or {})
    config["zero_optimization"] |= offloads or {}
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
        for name, parameter in model.named_parameters():
            with parameters_of.GatheredParameters([parameter]):  # its part may be in a file
                arm.weights[name] = parameter.detach().clone()
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


def zero3_cpu(arm: Arm) -> None:
    """DeepSpeed ZeRO-3 with optimizer and parameters offloaded to CPU memory, 2 ranks"""
    _train(arm, 3, {name: {"device": "cpu"} for name in ("offload_optimizer", "offload_param")})


def zero3_nvme(arm: Arm) -> None:
    """DeepSpeed ZeRO-3 with optimizer and parameters offloaded to NVMe (bfloat16), 2 ranks"""
    if reason := lacking_for_files():
        raise Lacking(reason)
    arm.scratch.mkdir()
    folder = {"device": "nvme", "nvme_path": str(arm.scratch)}
    # All parameters that DeepSpeed does not keep go to files.
    param = folder | {"buffer_size": _WIDE * 64, "max_in_cpu": 0}
    # DeepSpeed 0.19 prefetches the head twice from its file, as forward and backward want it in turn, and fails.
    settings = {"offload_optimizer": folder, "offload_param": param, "stage3_prefetch_bucket_size": 0}
    _train(arm, 3, settings, _HALF, _WIDE)
    written = {file.relative_to(arm.scratch).parts[1] for file in arm.scratch.rglob("*.swp") if file.stat().st_size}
    assert {"bfloat16params", "optimizer"} <= written, f"DeepSpeed has written no files of these, but of {written}"
