"""Life of ranks: one dies in backward, torchrun starts them again, and they share what a user may write in a day."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks._workload.llama import loss_of
from support.exactness import assert_bit_equal
from support.ranks import Llama, assert_exact, batch, plain_step, process_group, start, train
from tba import offload_context

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)


def _data_parallel() -> tuple[nn.Module, Any]:
    model = nn.parallel.DistributedDataParallel(Llama())
    return model, plain_step(model)


def _dies(rank: int, folder: str, scratch: str) -> None:
    with process_group(rank, 2, folder):
        model, _ = _data_parallel()
        offload = offload_context(model, tier="nvme", min_tensor_bytes=0, storage_paths=scratch)
        tokens = batch(0)
        with offload:
            logits = model(tokens)
        offload.flush()
        Path(folder, f"{rank}.written").write_text(str(offload.stats().file_bytes))
        dist.barrier()
        if rank == 1:
            logits.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        loss_of(logits, tokens).backward()
        Path(folder, f"{rank}.lives").touch()


@pytest.mark.slow
def test_a_rank_that_is_killed_in_backward_leaves_no_file(scratch: Path) -> None:
    folder, files = scratch / "rendezvous", scratch / "files"
    folder.mkdir()
    files.mkdir()
    # Which of the two is noticed first: the one that was killed, or the other, which then waits for it in vain.
    with pytest.raises((mp.ProcessExitedException, mp.ProcessRaisedException)):
        start(_dies, str(files), str(folder), ranks=2)
    assert not Path(folder, "1.lives").exists()
    assert [int(Path(folder, f"{rank}.written").read_text()) > 0 for rank in range(2)] == [True, True]
    assert list(files.iterdir()) == []


def _shares(rank: int, folder: str) -> None:
    os.environ["XDG_STATE_HOME"] = f"{folder}/state"
    with process_group(rank, 2, folder):
        stats, plain = assert_exact(_data_parallel, Path(folder), max_write_bytes_per_day=1 << 40)
        dist.barrier()  # both have closed theirs
        written = torch.tensor(stats.offloaded_bytes)
        dist.all_reduce(written)
        model, step = _data_parallel()
        settings = {"min_tensor_bytes": 0, "prefetch_bytes": 0, "max_write_bytes_per_day": int(written) - 1}
        offload = offload_context(model, tier="nvme", storage_paths=folder, **settings)
        assert_bit_equal(train(model, step(offload), offload), plain)
        stats = offload.stats()
        offload.close()
        assert stats.written_bytes == 0
        assert stats.kept_by_reason["write allowance of the day used up"] > 0


@pytest.mark.slow
def test_ranks_share_the_write_allowance_of_a_day(scratch: Path) -> None:
    start(_shares, str(scratch), ranks=2)


_ELASTIC = """
import os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from support.ranks import Llama, assert_exact, plain_step

torch.set_num_threads(1)
rank, count = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
# Not the store that torchrun offers: the addresses of the first start are in it still.
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}.{count}", rank=rank, world_size=2)

def make():
    model = nn.parallel.DistributedDataParallel(Llama())
    model.module.embed.weight.register_hook(gradient_came)
    return model, plain_step(model)

steps = 0

def gradient_came(_):
    global steps
    steps += 1
    if (rank, count, steps) == (1, "0", 5):  # three steps are plain: the second of those that are offloaded
        os.kill(os.getpid(), signal.SIGKILL)

stats, _ = assert_exact(make, Path(sys.argv[1]))
Path(sys.argv[2], f"{rank}.{count}").write_text(str(stats.written_bytes))
dist.barrier()
os._exit(0)
"""


@pytest.mark.slow
def test_torchrun_starts_ranks_again_after_one_was_killed(scratch: Path) -> None:
    files, ended = scratch / "files", scratch / "ended"
    files.mkdir()
    ended.mkdir()
    program = scratch / "program.py"
    program.write_text(_ELASTIC)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    run = subprocess.run(
        [sys.executable, *torchrun, str(program), str(files), str(ended)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert sorted(path.name for path in ended.iterdir()) == ["0.1", "1.1"]
    assert list(files.iterdir()) == []
