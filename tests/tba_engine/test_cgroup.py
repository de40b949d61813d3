"""Memory for real: in a cgroup that kills plain training, the same training finishes with the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cgroup import memory_cgroup

LIMIT_BYTES = 448 << 20  # of what a training adds to an interpreter that has imported torch

# Residual blocks that share one weight: much is saved (16 MiB a block, 8 of them twice), little is computed and nothing
# else is large. Each training runs in a fork of one interpreter, as importing torch takes longer than most of them, and
# prints a line: its exit status and what it found.
_TRAIN = """
import json, os, sys, torch
from torch import nn
from tba import offload_context

class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks, self.mix = blocks, nn.Linear(64, 64)

    def forward(self, x):
        for _ in range(self.blocks):
            x = x + torch.tanh(self.mix(torch.sigmoid(x)))
        return x.square().mean()

def train(tier, blocks, steps, scratch):
    torch.manual_seed(0)
    model = Net(blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32768, 64)
    losses = []
    offload = offload_context(model, tier=tier, storage_paths=scratch) if tier != "plain" else None
    for _ in range(steps):
        if offload is None:
            loss = model(x)
        else:
            with offload:
                loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    stats = offload.stats() if offload is not None else None
    return {"losses": losses, "written": stats.written_bytes if stats else 0}

torch.set_num_threads(1)
scratch, cgroup, *trainings = sys.argv[1:]
for training in trainings:
    tier, blocks, steps, limited = training.split(",")
    inlet, outlet = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if limited == "limited":
                with open(cgroup + "/cgroup.procs", "w") as file:
                    file.write(str(os.getpid()))
            os.write(outlet, json.dumps(train(tier, int(blocks), int(steps), scratch)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(outlet)
    with open(inlet) as file:
        found = file.read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), json.loads(found or "null")]), flush=True)
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with memory_cgroup(LIMIT_BYTES) as path:
        yield path


def _train(scratch: Path, cgroup: Path, *trainings: str) -> list[tuple[int, Any]]:
    """Exit status and result of each training: "tier,blocks,steps,limited" or "free", in the cgroup or out of it."""
    command = [sys.executable, "-c", _TRAIN, str(scratch), str(cgroup), *trainings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return [
        (status, found if status == 0 else done.stderr) for status, found in map(json.loads, done.stdout.splitlines())
    ]


@pytest.mark.exhaustive
def test_a_training_finishes_where_plain_is_killed(cgroup: Path, scratch: Path) -> None:
    (status, plain), killed, *ours, fits = _train(
        scratch,
        cgroup,
        "plain,30,2,free",  # 480 MiB, each once
        "plain,30,1,limited",
        "nvme,30,2,limited",
        "auto,30,2,limited",
        "auto,30,2,free",
    )
    assert status == 0, plain
    assert killed[0] == -9, "plain training fits: the test proves nothing"
    for status, found in ours:
        assert status == 0, found
        assert found["losses"] == plain["losses"]
        assert found["written"] > 0
    # where it fits, "auto" moves nothing
    status, found = fits
    assert status == 0, found
    assert found["written"] == 0
    assert found["losses"] == plain["losses"]
