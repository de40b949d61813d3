"""Two hosts with two ranks each: one plan for all four, gradients to the last bit, files on each host's own disk."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.clock import Counted, put
from support.exactness import assert_bit_equal
from support.hosts import two_hosts
from support.ranks import BLOCKS, Llama, plain_step, train
from tba import offload_context

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

STEPS, PORT = 8, 29713
BUDGETS = 2**30, 250_000, 2**30, 240_000  # of one rank on each host, and then of the other


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ranks_on_two_hosts_agree_and_write_to_their_own_disks(scratch: Path) -> None:
    with two_hosts() as hosts:
        processes = []
        for rank in range(4):
            host = hosts[rank // 2]
            disk = scratch / str(rank // 2)
            disk.mkdir(exist_ok=True)
            place = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
            meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT), "OMP_NUM_THREADS": "1"}
            paths = os.pathsep.join(sys.path)
            processes.append(host.start([__file__, str(disk)], **place, **meeting, PYTHONPATH=paths))
        said = [process.communicate(timeout=300)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * 4, "\n".join(said)


def _be_a_rank(disk: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    put(Counted())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,))

    def make() -> Llama:
        model = Llama()
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh)
        return model

    model = make()
    plain = train(model, plain_step(model)(None), nullcontext(), STEPS)
    model = make()
    settings = {"memory_budget": BUDGETS[rank], "max_write_rate": "1MB", "rank_timeout": 60}
    offload = offload_context(model, "auto", min_tensor_bytes=0, storage_paths=disk, **settings)
    moved = train(model, plain_step(model)(offload), offload, STEPS)
    plan, stats = offload.plan, offload.stats()
    assert_bit_equal(moved, plain, f"rank {rank}:")
    assert not stats.errors
    assert plan
    assert 0 < len(plan.recomputed) < BLOCKS
    assert plan.agreed.startswith("agreed by ranks 0 to 3: rank 3 has the least room"), plan.agreed
    if BUDGETS[rank] < 2**30:
        assert stats.written_bytes > 0
        assert any(_is_in(disk, number) for number in os.listdir("/proc/self/fd"))
    offload.close()
    dist.barrier()
    assert not [file for file in disk.rglob("*") if file.is_file()]
    dist.barrier()
    os._exit(0)


def _is_in(disk: Path, number: str) -> bool:
    """Whether this process has a file there open by this number; it may have no name any more."""
    link = Path("/proc/self/fd") / number
    return link.is_symlink() and os.readlink(link).startswith(f"{disk}/")


if __name__ == "__main__":
    _be_a_rank(Path(sys.argv[1]))
