"""Forecasts of ranks against real ones: what the engine moves of a step under tensor parallelism and FSDP."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from support.forecast import FAMILIES, LEAST_BYTES
from support.ranks import process_group, start
from tba import offload_context
from tba._forecast.hardware import DEVICES
from tba._forecast.observe import observe

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)
pytest.importorskip("transformers")

RANKS = 2
CPU = replace(DEVICES["h100"], like_cuda=False)


def _tensor(model: Any, mesh: Any) -> None:
    """Spread the model as its own tp_plan says, by PyTorch's own styles."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    made: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh, {name: made[style]() for name, style in model.tp_plan.items()})


def _fsdp(model: Any, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


WAYS: dict[str, Callable[[nn.Module, Any], None]] = {"tensor": _tensor, "fsdp": _fsdp}


def _main(rank: int, way: str, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    with process_group(rank, RANKS, folder):
        model, batch = FAMILIES["llama"]()
        WAYS[way](model, init_device_mesh("cpu", (RANKS,)))
        settings: dict[str, Any] = {"min_tensor_bytes": LEAST_BYTES, "storage_paths": folder}
        offload = offload_context(model, tier="nvme", **settings)
        with offload.trace() as events, offload:
            model(**batch).loss.backward()
        stats = offload.stats()
        assert not stats.errors
        saved = sorted(event.nbytes for event in events if event.kind == "saved")
        Path(folder, f"{rank}.json").write_text(json.dumps([saved, stats.offloaded_bytes]))
        offload.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_forecast_rank_saves_what_the_engine_sees_of_a_real_one(way: str, scratch: Path) -> None:
    start(_main, str(scratch), way, ranks=RANKS)
    ranks = [json.loads((scratch / f"{rank}.json").read_text()) for rank in range(RANKS)]
    tensor = RANKS if way == "tensor" else 1
    found = observe(FAMILIES["llama"], CPU, min_tensor_bytes=LEAST_BYTES, tensor=tensor)
    forecast = sorted(each.nbytes for each in found.saved)
    assert len(forecast) > 20
    for saved, moved_bytes in ranks:
        assert moved_bytes == sum(saved)
        assert saved == forecast
