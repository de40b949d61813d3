"""Smoke test of an installed tba: three steps through the file and plain ones end in the same weights.

Run by `make wheel` with `python -I`, in an environment that has nothing but the wheel and what it asks for.
"""

from __future__ import annotations

import copy
import tempfile

import torch
from torch import nn

import compact
import io_backends
import tba


def train(model: nn.Module, batches: list[torch.Tensor], offload: tba.Offloader | None) -> list[torch.Tensor]:
    """Three steps, within the context where one is given; the weights they end in."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        if offload is None:
            loss = model(batch).square().mean()
        else:
            with offload:
                loss = model(batch).square().mean()
            offload.flush()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def main() -> None:
    """Compare exact training under tier nvme, with and without a codec, and say what was seen."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)]
    model, batches = nn.Sequential(*blocks), [torch.randn(256, 128) for _ in range(3)]
    plain = train(copy.deepcopy(model), batches, None)
    for compress in (None, "exact"):
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            mine = copy.deepcopy(model)
            offload = tba.offload_context(
                mine, tier="nvme", compress=compress, storage_paths=folder, min_tensor_bytes=0, prefetch_bytes=0
            )
            moved = train(mine, batches, offload)
            stats = offload.stats()
            offload.close()
        if not all(map(torch.equal, moved, plain)):
            raise SystemExit(f"compress={compress!r}: weights differ from plain PyTorch's")
        if not stats.read_bytes or stats.errors:
            raise SystemExit(f"compress={compress!r}: nothing went through the file, or not all:\n{stats}")
    print(f"tba {tba.__version__}, torch {torch.__version__}: bit-equal, {stats.read_bytes:,} bytes read back")
    print(*(module.__file__ for module in (tba, compact, io_backends)), sep="\n")


if __name__ == "__main__":
    main()
