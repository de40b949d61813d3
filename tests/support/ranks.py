"""Ranks: processes of one training over gloo, and the small Llama that they train."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from benchmarks._workload import llama
from benchmarks._workload.llama import LlamaSizes, loss_of
from benchmarks._workload.tools import local
from support.clock import Counted, put
from support.exactness import assert_bit_equal
from tba import Offloader, OffloadStats, offload_context

SIZES = LlamaSizes(layers=4, width=32, heads=4, hidden=64, sequence=16, vocabulary=64)
BLOCKS, ROWS = SIZES.layers, 4


class Llama(llama.Llama):
    """The small one that tests train."""

    def __init__(self) -> None:
        super().__init__(SIZES)


def batch(step: int) -> Tensor:
    """Tokens of one step, equal on all ranks."""
    return torch.randint(SIZES.vocabulary, (ROWS, SIZES.sequence), generator=torch.Generator().manual_seed(step))


# Trains for one step and returns what is to be equal: losses, outputs.
Step = Callable[[int], list[Tensor]]


def train(model: nn.Module, step: Step, context: Any, steps: int = 3) -> list[Any]:
    """Train; return the losses, and this rank's part of each gradient and of the weights at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for number in range(steps):
        with context:
            found += [local(loss).detach().clone() for loss in step(number)]
        found += [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(local(p.detach()).clone() for p in model.parameters())]


def assert_exact(
    make: Callable[[], tuple[nn.Module, Callable[[Offloader | None], Step]]], scratch: Path, **settings: Any
) -> tuple[OffloadStats, list[Any]]:
    """Assert that a training through the file is to the last bit the one without; return its statistics, and it."""
    model, step = make()
    plain = train(model, step(None), nullcontext())
    model, step = make()
    config = {"tier": "nvme", "min_tensor_bytes": 0, "prefetch_bytes": 0, "storage_paths": scratch} | settings
    offload = offload_context(model, **config)
    moved = train(model, step(offload), offload)
    stats = offload.stats()
    offload.close()
    assert_bit_equal(moved, plain)
    assert not stats.errors
    assert stats.live_records == 0
    assert stats.written_bytes > 0
    assert stats.read_bytes > 0
    return stats, plain


def plain_step(model: nn.Module) -> Callable[[Offloader | None], Step]:
    """Forward and backward of a whole batch; what is saved is all written before backward."""

    def make(offload: Offloader | None) -> Step:
        def step(number: int) -> list[Tensor]:
            tokens = batch(number).to(next(model.parameters()).device)
            loss = loss_of(model(tokens), tokens)
            if offload is not None:
                offload.flush()
            loss.backward()
            return [loss]

        return step

    return make


def innermost(tensor: Any) -> Iterator[Tensor]:
    """The tensors that hold the elements of a saved tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(each := getattr(tensor, name), Tensor):
            yield from innermost(each)


def start(main: Callable[..., None], folder: str, *arguments: Any, ranks: int, limit_s: float | None = None) -> None:
    """Run `main(rank, *arguments, folder)` in as many processes, to their end; past the limit they are killed.

    They are forked from a process that has imported what takes seconds to import, and done nothing else.
    """
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "tba"])
    running = mp.start_processes(main, (*arguments, folder), nprocs=ranks, join=False, start_method="forkserver")
    until_s = None if limit_s is None else time.monotonic() + limit_s
    while not running.join(None if until_s is None else until_s - time.monotonic()):  # it returns at the end of each
        if until_s is not None and time.monotonic() > until_s:
            for process in running.processes:
                process.kill()
            raise TimeoutError(f"ranks were not through within {limit_s:g} s")


@contextmanager
def process_group(rank: int, ranks: int, folder: str, backend: str = "gloo") -> Iterator[None]:
    """Be one rank for the rest of the process, which ends here if all goes well; its plans go by a counted clock."""
    put(Counted())
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    yield
    dist.barrier()  # nobody is gone while another still talks to it
    os._exit(0)  # past the end of torch's own threads, which aborts now and then: terminate without an exception
