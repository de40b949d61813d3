"""Models compiled whole under DDP: what they save moves within their graphs, and gradients stay the compiler's own."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.exactness import assert_bit_equal
from support.ranks import process_group, start, train
from support.whole_models import Net, batch
from tba import Offloader, offload_context

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler; there is no g++")

RANKS = 2
MOST_MOVED, BLOCK_BYTES = 16, 512


def _ddp(model: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)  # each layer in a bucket of its own


def _inside(model: nn.Module) -> Any:
    model.compile()
    return _ddp(model)


# Compiled around DDP or inside of it. PyTorch splits the model where DDP's buckets end: each is a graph.
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "around": lambda model: torch.compile(_ddp(model)),
    "inside": _inside,
    "wrapped": lambda model: _ddp(torch.compile(model)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "nvme": {"tier": "nvme", "prefetch_bytes": 0, "staging_bytes": 1 << 14},
    "budget": {"tier": "auto", "memory_budget": 1 << 16},
}


def _main(rank: int, way: str, folder: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "inductor"))
    from torch._inductor import config

    vars(dist)["_DEFAULT_FIRST_BUCKET_BYTES"] = 1024  # PyTorch wants no bucket to be smaller than the first
    with process_group(rank, RANKS, folder), config.patch(compile_threads=1):

        def run(**settings: Any) -> tuple[list[Any], Offloader | None]:
            torch.compiler.reset()
            torch.manual_seed(0)
            model = WAYS[way](Net(2, dropout=0.0))
            own = {"min_tensor_bytes": 64, "storage_paths": folder}
            offload = offload_context(model, **own, **settings) if settings else None

            def step(number: int) -> list[Tensor]:
                torch.manual_seed(2 * number + rank)  # each rank has examples of its own
                loss: Tensor = model(*batch())
                loss.backward()
                return [loss]

            return train(model, step, offload or nullcontext()), offload

        plain, _ = run()
        for settings in SETTINGS.values():
            moved, offload = run(**settings)
            assert_bit_equal(moved, plain, f"rank {rank}, {way}, {settings}:")
            gc.collect()
            assert offload is not None
            stats = offload.stats()
            assert "within 3 compiled graphs" in str(offload.plan)
            assert not stats.errors
            assert stats.live_records == 0
            if settings["tier"] == "nvme":
                assert (last := stats.last_step) is not None
                # In whole blocks: by its address, a tensor that is read may need one more than when it was written.
                assert 0 < last.read_bytes <= last.written_bytes + MOST_MOVED * BLOCK_BYTES, stats
            offload.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["around", *(pytest.param(way, marks=pytest.mark.exhaustive) for way in WAYS if way != "around")]
)
def test_what_ddp_trains_moves_within_its_graphs(way: str, scratch: Path) -> None:
    start(_main, str(scratch), way, ranks=RANKS)
