"""ZeRO-3: ranks recompute the same blocks, whose hooks gather weights again as they do under PyTorch's checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from benchmarks._workload.llama import loss_of
from matrix.arms import zero
from matrix.launch import by_torchrun, launch
from support.clock import Counted, put
from support.ranks import BLOCKS, Llama, batch
from tba._blocks.communication import Communication

LIMIT_S = 300
STEPS = 15  # of which the first ten have agreed and timed, and DeepSpeed has noted the order of modules in those after
# Whether DeepSpeed holds what it has gathered for as long as it can, and gathers ahead; or not at all.
EAGER = {"stage3_param_persistence_threshold": 0}
LAZY = EAGER | {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}


def _train(settings: dict[str, Any], own: dict[str, Any] | None, checkpointed: Collection[int]) -> dict[str, Any]:
    """Train a small Llama; tell its losses, this rank's weights, collectives of each step, and what recomputes."""
    from tba.integrations.deepspeed import initialize

    model = Llama()
    for number in checkpointed:
        block = model.blocks[number]
        vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
    config = zero(3, 4) | ({} if own is None else {"tba": own})
    config["zero_optimization"] |= settings
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    losses, counts = [], []
    for number in range(STEPS):
        tokens = batch(number)
        with Communication() as communication:
            loss = loss_of(engine(tokens), tokens)
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        counts.append(sum(communication.counts))
    weights = [parameter.ds_tensor.tolist() for parameter in model.parameters()]
    plan = None if engine.offload is None else engine.offload.plan
    if engine.offload is not None:
        assert not engine.offload.stats().errors
        engine.offload.close()
    engine.destroy()
    return {"exact": [losses, weights], "counts": counts, "recomputed": sorted(plan.recomputed) if plan else []}


def main(folder: str, settings: dict[str, Any]) -> None:
    """Train plainly, by a plan, and with checkpoints around what that recomputes."""
    import deepspeed

    put(Counted())
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    budget_bytes, rate = ((240_000, "1MB"), (2**30, "8MB"))[dist.get_rank()]  # alone, rank 1 would plan nothing
    own = {"tier": "auto", "min_tensor_bytes": 0, "memory_budget": budget_bytes, "max_write_rate": rate}
    planned = _train(settings, own | {"storage_paths": folder}, ())
    found = {
        "planned": planned,
        "plain": _train(settings, None, ()),
        "checkpointed": _train(settings, None, planned["recomputed"]),
    }
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()


@pytest.mark.parametrize("settings", [EAGER, LAZY], ids=["eager", "lazy"])
def test_blocks_recompute_alike_with_the_gathers_of_checkpoints(settings: dict[str, Any], tmp_path: Path) -> None:
    program = [*by_torchrun(2), "-m", "matrix.test_zero3", str(tmp_path), json.dumps(settings)]
    status, printed = launch(program, tmp_path, LIMIT_S)
    assert status == 0, printed[-6000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["planned"]["recomputed"] == ranks[1]["planned"]["recomputed"]
    for found in ranks:
        planned, plain, checkpointed = (found[name] for name in ("planned", "plain", "checkpointed"))
        assert planned["exact"] == plain["exact"] == checkpointed["exact"]
        assert 0 < len(planned["recomputed"]) < BLOCKS
        assert planned["counts"][-2:] == checkpointed["counts"][-2:]
        assert (checkpointed["counts"][-1] > plain["counts"][-1]) == (settings is LAZY)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
