"""CompActAdamW.reduce_gradients: two ranks under DistributedDataParallel train as one process on both halves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compact import CompActAdamW, convert
from support.ranks import start


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 6)).double()


def _batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    for _ in range(count):
        x, y = torch.randn(10, 30, generator=generator, dtype=torch.float64).split([24, 6], dim=1)
        yield x, y


def _space(weight: Tensor) -> Any:
    return weight.subspace  # type: ignore[attr-defined]


def _rank_main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = _model()
    convert(model, rank=6, refresh=2, skip=())
    parallel = DistributedDataParallel(model)
    optimizer = CompActAdamW(model.parameters(), lr=0.05)
    for x, y in _batches(5):
        optimizer.zero_grad()
        half = slice(0, 5) if rank == 0 else slice(5, 10)
        (parallel(x[half]) - y[half]).square().mean().backward()
        assert all(p.grad is None for p in model.parameters() if p.dim() == 2)
        optimizer.reduce_gradients()
        optimizer.step()
    # A layer that one rank did not use counts as zero there; one that none used stays without a gradient.
    optimizer.zero_grad()
    x = next(_batches(1))[0]
    if rank == 0:
        model[0](x).sum().backward()
        alone = _space(model[0].weight).grad.clone()
    optimizer.reduce_gradients()
    assert _space(model[3].weight).grad is None
    assert _space(model[0].weight).grad.shape == (32, 6)
    if rank == 0:
        torch.testing.assert_close(_space(model[0].weight).grad, alone / 2)
    torch.save([p.detach() for p in model.parameters()], f"{folder}/{rank}.pt")
    dist.barrier()  # neither is gone while the other still talks to it
    os._exit(0)  # past the end of torch's own threads, which aborts now and then: terminate without an exception


def test_two_ranks_train_as_one_on_both_halves() -> None:
    model = _model()
    convert(model, rank=6, refresh=2, skip=())
    optimizer = CompActAdamW(model.parameters(), lr=0.05)
    for x, y in _batches(5):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        start(_rank_main, folder, ranks=2)
        ranks = [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(2)]
    for one, first, second in zip(model.parameters(), *ranks, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, one.detach(), rtol=1e-7, atol=1e-9)
