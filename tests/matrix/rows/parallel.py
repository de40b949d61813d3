"""Parallel: PyTorch's own ways to train on several ranks, and compiled blocks, with `tba.attach`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from matrix.arms import Arm, batches
from matrix.rows.huggingface import llama
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


def ddp(arm: Arm) -> None:
    """DistributedDataParallel, 2 ranks"""
    train(arm, DistributedDataParallel(llama()), rank=dist.get_rank())


def fsdp2(arm: Arm) -> None:
    """FSDP2 (fully_shard), 2 ranks"""
    model = llama()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*model.model.layers, model):
        fully_shard(block, mesh=mesh)
    train(arm, model, rank=dist.get_rank())


def tensor(arm: Arm) -> None:
    """Tensor parallel, 2 ranks"""
    model = llama()
    _tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    train(arm, model, rank=0)


def tensor_fsdp2(arm: Arm) -> None:
    """Tensor parallel and FSDP2, 4 ranks"""
    model = llama()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    _tensor_parallel(model, mesh["tensor"])
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["data"])
    train(arm, model, rank=mesh.get_local_rank("data"))


def pipeline(arm: Arm) -> None:
    """Pipeline (GPipe), 2 ranks"""
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(VOCABULARY, 64), *(_Block() for _ in range(4)), nn.Linear(64, VOCABULARY))
    model = whole[:3] if rank == 0 else whole[3:]
    stage = PipelineStage(model, rank, dist.get_world_size(), torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=3, loss_fn=_loss)
    offload = attach(model, **arm.settings) if arm.settings is not None else None
    arm.watch(offload, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens in batches(VOCABULARY, BATCH):
        losses: list[Tensor] = []
        schedule.step(tokens) if rank == 0 else schedule.step(target=tokens, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        arm.losses.append(sum(loss.item() for loss in losses))
    arm.end(model, close=True)


class _Block(nn.Module):
    """A feed-forward block with a residual connection, as a stage needs one input and one output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 160), nn.GELU(), nn.Linear(160, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def compiled(arm: Arm) -> None:
    """torch.compile of each block"""
    torch.compiler.reset()
    model = llama()
    model.config.use_cache = False
    for block in model.model.layers:
        block.compile()
    train(arm, model, rank=0)
