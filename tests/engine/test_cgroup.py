"""Memory for real: in a cgroup that kills plain training, the same training finishes with the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

LIMIT_BYTES = 448 << 20
CGROUPS = Path("/sys/fs/cgroup/memory")

# Residual blocks that share one weight: much is saved (24 MiB a block), little is computed and nothing else is large.
_TRAIN = """
import json, sys, torch
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

torch.manual_seed(0)
torch.set_num_threads(1)
tier, blocks, steps, scratch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
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
print(json.dumps({"losses": losses, "saved": stats.last_step.saved_bytes if stats else 0,
                  "written": stats.written_bytes if stats else 0}))
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup (v1) with a limit and no swap."""
    path = CGROUPS / f"tba-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    with suppress(OSError):  # absent where swap is not accounted
        (path / "memory.memsw.limit_in_bytes").write_text(str(LIMIT_BYTES))
    yield path
    path.rmdir()


def _train(
    tier: str, blocks: int, steps: int, scratch: Path, cgroup: Path | None = None
) -> tuple[int, dict[str, object]]:
    def enter() -> None:
        if cgroup is not None:
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, "-c", _TRAIN, tier, str(blocks), str(steps), str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=enter, timeout=300)
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else {"stderr": done.stderr}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_same_training_finishes_where_plain_is_killed(cgroup: Path, scratch: Path) -> None:
    blocks = 26  # 624 MiB saved
    status, plain = _train("plain", blocks, 3, scratch)
    assert status == 0, plain
    status, _ = _train("plain", blocks, 3, scratch, cgroup)
    assert status == -9, "plain training fits: the test proves nothing"
    for tier in ("nvme", "auto"):
        status, ours = _train(tier, blocks, 3, scratch, cgroup)
        assert status == 0, (tier, ours)
        assert ours["losses"] == plain["losses"]
        assert int(str(ours["written"])) > 0
    # where it fits, "auto" moves nothing
    status, fits = _train("auto", blocks, 2, scratch)
    assert status == 0, fits
    assert fits["written"] == 0
    assert fits["losses"] == plain["losses"][:2]  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_step_that_saves_four_times_the_limit_finishes(cgroup: Path, scratch: Path) -> None:
    blocks = 78
    status, plain = _train("plain", blocks, 1, scratch)
    assert status == 0, plain
    for tier in ("nvme", "auto"):
        status, ours = _train(tier, blocks, 1, scratch, cgroup)
        assert status == 0, (tier, ours)
        assert ours["losses"] == plain["losses"]
        assert int(str(ours["saved"])) >= 4 * LIMIT_BYTES
