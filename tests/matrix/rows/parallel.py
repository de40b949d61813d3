"""Parallel: PyTorch's own ways to train on several ranks, and compiled blocks, with `tba.attach`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, OffloadPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from matrix.arms import Arm, batches
from matrix.models import llama
from tba import attach

VOCABULARY, BATCH = 96, (3, 70)


def train(arm: Arm, model: nn.Module, *, rank: int) -> None:
    """Train with `attach`; each rank has batches of its own where `rank` says which."""
    offload = attach(model, **arm.settings) if arm.settings is not None else None
    arm.watch(offload, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens in batches(VOCABULARY, BATCH, seed=rank):
        loss = _loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        arm.losses.append(loss.item())
    arm.end(model, close=True)


def _loss(output: object, tokens: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _tensor_parallel(model: nn.Module, mesh: object) -> None:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def _sequence_parallel(model: nn.Module, mesh: object) -> None:
    """Between the layers, and in their norms, each rank has some positions of the sequence."""
    one, all_ = Shard(1), Replicate()
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel(output_layouts=one))
    plan |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), SequenceParallel(use_local_output=True))
    hidden = {"input_kwarg_layouts": {"hidden_states": one}, "desired_input_kwarg_layouts": {"hidden_states": all_}}
    plan["self_attn"] = PrepareModuleInput(**hidden)
    plan["mlp"] = PrepareModuleInput(input_layouts=(one,), desired_input_layouts=(all_,))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    first = PrepareModuleInput(input_layouts=(all_,), desired_input_layouts=(one,), use_local_output=True)
    ends = {
        "model.layers.0": first,
        "model.norm": SequenceParallel(use_local_output=True),
        "lm_head": ColwiseParallel(input_layouts=one, output_layouts=all_),
    }
    parallelize_module(model, mesh, ends)


def ddp(arm: Arm) -> None:
    """DistributedDataParallel, 2 ranks"""
    train(arm, DistributedDataParallel(llama()), rank=dist.get_rank())


def fsdp1(arm: Arm) -> None:
    """FSDP1 (FullyShardedDataParallel), 2 ranks"""
    model = llama()
    arm.shapes |= {tuple(parameter.shape) for parameter in model.parameters()}
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    cpu = torch.device("cpu")
    train(arm, FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=cpu), rank=dist.get_rank())


def fsdp2(arm: Arm, policy: OffloadPolicy = OffloadPolicy()) -> None:  # noqa: B008  # it is frozen
    """FSDP2 (fully_shard), 2 ranks"""
    model = llama()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*model.model.layers, model):
        fully_shard(block, mesh=mesh, offload_policy=policy)
    train(arm, model, rank=dist.get_rank())


def fsdp2_offloads(arm: Arm) -> None:
    """FSDP2 with CPUOffloadPolicy, 2 ranks"""
    fsdp2(arm, CPUOffloadPolicy(pin_memory=False))


def tensor(arm: Arm) -> None:
    """Tensor parallel, 2 ranks"""
    model = llama()
    _tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    train(arm, model, rank=0)


def sequence(arm: Arm) -> None:
    """Tensor and sequence parallel, 2 ranks"""
    model = llama()
    _sequence_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    train(arm, model, rank=0)


def tensor_fsdp2(arm: Arm) -> None:
    """Tensor parallel and FSDP2, 4 ranks"""
    model = llama()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    _tensor_parallel(model, mesh["tensor"])
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["data"])
    train(arm, model, rank=mesh.get_local_rank("data"))


def compiled(arm: Arm) -> None:
    """torch.compile of each block"""
    torch.compiler.reset()
    model = llama()
    model.config.use_cache = False
    for block in model.model.layers:
        block.compile()
    train(arm, model, rank=0)


def whole(arm: Arm) -> None:
    """torch.compile of the whole model, as in nanoGPT"""
    torch.compiler.reset()
    arm.only_move()
    model = llama()
    model.config.use_cache = False
    train(arm, torch.compile(model), rank=0)
