"""Ranks of one node: room for scratch files goes to the rank that needs it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._workload.llama import loss_of
from support.exactness import assert_bit_equal
from support.ranks import Llama, batch, process_group, start, train
from tba import offload_context

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

STEPS = 7  # two tell the needs, one gives room back, one has seen that


def _step(rank: int, model: nn.Module, offload: Any, seen: Callable[[], None]) -> Callable[[int], list[Tensor]]:
    """A step in which the first rank has four times the examples of the other; what it has `seen` before backward."""

    def step(number: int) -> list[Tensor]:
        tokens = batch(number).repeat(1 if rank else 4, 1)
        loss = loss_of(model(tokens), tokens)
        if offload is not None:
            offload.flush()
        seen()
        loss.backward()  # type: ignore[no-untyped-call]
        return [loss]

    return step


def _by_need(rank: int, folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    with process_group(rank, 2, folder):
        model = nn.parallel.DistributedDataParallel(Llama())
        plain = train(model, _step(rank, model, None, lambda: None), nullcontext(), STEPS)
        needs: list[Any] = [None, None]
        told: list[Any] = [None, None]
        budget = 1 << 40
        for share in (None, 4 / 3):
            if share is not None:  # of what both need, which is too little for the first rank's half
                budget = int(share * sum(needs))
            model = nn.parallel.DistributedDataParallel(Llama())
            settings = {"min_tensor_bytes": 0, "prefetch_bytes": 0, "storage_paths": folder, "nvme_budget": budget}
            offload = offload_context(model, "nvme", **settings)
            occupied: list[int] = []
            failed: list[int] = []

            def look(offload: Any = offload, occupied: list[int] = occupied, failed: list[int] = failed) -> None:
                stats = offload.stats()
                occupied.append(stats.file_bytes)
                failed.append(stats.kept_by_reason.get("write failed", 0))

            assert_bit_equal(train(model, _step(rank, model, offload, look), offload, STEPS), plain)
            offload.close()
            dist.all_gather_object(told, (occupied, failed))
            dist.all_gather_object(needs, offload.stats().written_bytes // STEPS)
        (first_bytes, first_failed), (second_bytes, second_failed) = told
        assert 0 < first_failed[0] < first_failed[1] <= first_failed[-2] == first_failed[-1], (
            "half is too little, its share by need is not"
        )
        assert second_failed == [0] * STEPS
        assert first_bytes[-1] > budget // 2
        assert first_bytes[-1] + second_bytes[-1] <= budget


@pytest.mark.slow
def test_room_for_files_goes_to_the_rank_that_needs_it(scratch: Path) -> None:
    torch.manual_seed(0)
    start(_by_need, str(scratch), ranks=2)
