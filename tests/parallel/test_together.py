"""Two kinds of parallelism at once, over four ranks: FSDP2 with sequence parallelism, and with stages of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from benchmarks._workload.parallel import sequence_parallel
from support.parallel import pipeline
from support.ranks import Llama, assert_exact, plain_step, process_group, start

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)


def _four_ranks(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with process_group(rank, 4, folder):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "data"))

        def shard(model: nn.Module) -> None:
            for each in (*model.blocks, model):  # type: ignore[misc]
                fully_shard(each, mesh=mesh["data"])

        def sequence_and_data() -> tuple[nn.Module, Any]:
            model = Llama()
            sequence_parallel(model, mesh["other"])
            shard(model)
            return model, plain_step(model)

        stats, _ = assert_exact(sequence_and_data, Path(folder))
        assert not stats.kept_by_reason, stats
        assert stats.weight_bytes > 0
        stats, _ = assert_exact(lambda: pipeline("1F1B", mesh.get_group("other"), shard), Path(folder))
        assert not stats.kept_by_reason, stats
        assert stats.weight_bytes > 0


@pytest.mark.slow
def test_sharded_weights_with_sequence_and_pipeline_parallelism_are_exact(scratch: Path) -> None:
    start(_four_ranks, str(scratch), ranks=4)
