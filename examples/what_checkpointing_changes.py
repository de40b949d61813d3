"""What a forward changes, checkpointing changes twice: batch-norm statistics, a queue, a schedule. Offloading does not.

python examples/what_checkpointing_changes.py           # or: python examples/what_checkpointing_changes.py STEPS
"""

import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tba

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 8
WIDTH, QUEUE, BATCH = 16, 1024, 32


class Block(nn.Module):
    """A residual block with batch norm, whose noise fades with the number of calls."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        noise = 0.1 * 0.9**self.calls * torch.randn_like(x)
        return x + torch.relu(self.norm(self.conv(x + noise)))


class Contrast(nn.Module):
    """Puts features into a queue, and compares them with those that were there before, as contrastive losses do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", nn.functional.normalize(torch.randn(QUEUE, WIDTH)))
        self.register_buffer("pointer", torch.tensor(0))

    def forward(self, x):
        features = nn.functional.normalize(x.mean((2, 3)))
        before, place = self.queue.clone(), int(self.pointer)
        self.queue[place : place + BATCH] = features.detach()
        self.pointer.fill_((place + BATCH) % QUEUE)
        return (features @ before.T / 0.2).logsumexp(1).mean()


def train(run_block=lambda block, x: block(x), **settings):
    """Train from the same seed; return the state after the last step, and what offloaded it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), *(Block() for _ in range(4)), Contrast())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    offload = tba.offload_context(model, **settings) if settings else None
    for _ in range(steps):
        x = torch.randn(BATCH, 3, 32, 32)
        with offload or nullcontext():
            for block in model:
                x = run_block(block, x)
        x.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), offload


plain, _ = train()
checkpointed, _ = train(lambda block, x: checkpoint(block, x, use_reentrant=False))
on_disk, on_disk_by = train(tier="nvme")
planned, planned_by = train(memory_budget="12MiB")

rows = {
    "calls of a block": "1.calls",
    "batches that batch norm saw": "1.norm.num_batches_tracked",
    "batch norm's mean": "1.norm.running_mean",
    "batch norm's variance": "1.norm.running_var",
    "the queue's pointer": "5.pointer",
    "the queue": "5.queue",
    "a convolution's weights": "1.conv.weight",
}
states = {"checkpoint": checkpointed, "tba, nvme": on_disk, "tba, 12MiB": planned}
print(f"{f'after {steps} steps, averages':30}{'plain':>12}" + "".join(f"{name:>16}" for name in states))
for title, name in rows.items():
    cells = f"{title:30}{plain[name].double().mean():12.6g}"
    for state in states.values():
        cells += f"{state[name].double().mean():14.6g} {'=' if torch.equal(state[name], plain[name]) else 'x'}"
    print(cells)
for title, state in states.items():
    same = sum(torch.equal(state[name], plain[name]) for name in plain)
    print(f"{title}: {same} of {len(plain)} tensors of the state are equal to plain's, bit for bit")
for title, offload in {"tba, nvme": on_disk_by, "tba, 12MiB": planned_by}.items():
    stats = offload.stats()
    saved, moved = (f"{nbytes / 2**20:.1f} MiB" for nbytes in (stats.saved_bytes, stats.offloaded_bytes))
    print(f"{title}: saved {saved}, handed to the tier {moved}")
    offload.close()
