"""Selective checkpointing whose policy stores a collective's result, which may still be under way."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from support.ranks import process_group, start
from tba import offload_context
from tba.integrations.checkpoint import create_selective_checkpoint_contexts

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)


class _Begun(torch.autograd.Function):
    """A sum over the ranks that is under way when it is returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        assert group is not None
        return torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Awaited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _region(x: Tensor) -> Tensor:
    begun = _Begun.apply(x.sin())
    beside = x.sin().exp().sin()  # operators that end while the others are still to come
    return (_Awaited.apply(begun).cos() * beside).sum()


def _two_ranks(rank: int, folder: str) -> None:
    stored = [torch.ops._c10d_functional.all_reduce.default, torch.ops.aten.exp.default]
    with process_group(rank, 2, folder):
        x = torch.linspace(0, 1, 1 << 16).mul(rank + 1).requires_grad_()
        _region(x).backward()
        plain, x.grad = x.grad, None
        with offload_context(tier="nvme", min_tensor_bytes=0, prefetch_bytes=0, storage_paths=folder) as offload:
            dist.barrier()
            time.sleep(0.5 * rank)  # rank 0 has begun long before rank 1
            contexts = partial(create_selective_checkpoint_contexts, stored)
            loss = checkpoint(_region, x, use_reentrant=False, context_fn=contexts)
            offload.flush()
            loss.backward()
        assert plain is not None
        assert x.grad is not None
        assert torch.equal(x.grad, plain)
        assert offload.stats().read_bytes


def test_a_collective_under_way_is_stored_when_it_has_ended(scratch: Path) -> None:
    start(_two_ranks, str(scratch), ranks=2)
