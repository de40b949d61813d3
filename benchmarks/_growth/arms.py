"""Growth arms: a training under a limit of memory, and chains of many small saved tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from .._arms.train import TrainArm, TrainOptions
from .._processes.serve import Tell
from .cgroup import enter

if TYPE_CHECKING:
    from tba import Offloader

_FLOATS = 1024  # of a saved tensor: 4 KiB
# Next to nothing is held back, and what is on its way out when backward begins arrives first: else the fewer records a
# chain has, the fewer of them would be read back.
_WINDOW = {"min_tensor_bytes": 0, "prefetch_bytes": 16 * 4 * _FLOATS, "staging_bytes": 1 << 20}
_LEAST = 2000  # saved tensors of a turn: short chains are repeated, and their median counts


@dataclass(frozen=True, kw_only=True)
class LimitedOptions(TrainOptions):
    """Options of the arm: `cgroup`, a folder that it enters with its model built, "" for none."""

    cgroup: str = ""


class LimitedArm(TrainArm):
    """A `TrainArm` in a memory cgroup."""

    options_class = LimitedOptions

    def _enter_context(self) -> Any:
        if self.options.cgroup:
            enter(Path(self.options.cgroup))
        return super()._enter_context()


class RecordsArm:
    """An arm that runs chains of operators that save one tensor each, plain and offloaded.

    Options: `sizes`, the numbers of saved tensors. A turn answers, for `plain` and `offload`, seconds of a chain by
    size: `wall`, and `cpu` of the calling thread.
    """

    def __init__(self, options: Mapping[str, Any], tell: Tell) -> None:
        from tba import offload_context

        torch.set_num_threads(1)
        self.about: dict[str, Any] = {}
        self.sizes: list[int] = options["sizes"]
        self.offload = offload_context(tier="nvme", **_WINDOW)

    def turn(self, index: int) -> dict[str, Any]:
        """Run every chain both ways."""
        contexts: dict[str, Offloader | None] = {"plain": None, "offload": self.offload}
        answer: dict[str, Any] = {name: {} for name in contexts}
        for size in self.sizes:
            times = max(1, _LEAST // size)
            for name, offload in contexts.items():
                wall_s, cpu_s = zip(*(_chain_s(size, offload) for _ in range(times)), strict=True)
                answer[name][str(size)] = {"wall": median(wall_s), "cpu": median(cpu_s)}
        return answer

    def close(self) -> dict[str, Any]:
        """Close the offloader; return its counters."""
        stats = self.offload.stats()
        self.offload.close()
        return {"read_bytes": stats.read_bytes, "offloaded_bytes": stats.offloaded_bytes}


def _chain_s(size: int, offload: Offloader | None) -> tuple[float, float]:
    leaf = torch.full((_FLOATS,), 0.5, requires_grad=True)
    begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
    with offload or nullcontext():
        x = leaf
        for _ in range(size):
            x = torch.tanh(x)  # which saves its output
    if offload is not None:
        offload.flush()
    x.sum().backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    return time.perf_counter() - begun_s, time.thread_time() - begun_cpu_s
