"""ZeRO-3: one rank of a training by DeepSpeed, whose engine gathers weights, and steps."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed import zero
from torch import Tensor, nn

from tba.integrations.deepspeed import initialize

from .._processes.disk_bytes import disk_bytes
from .._workload.async_io import builder
from .._workload.llama import loss_of

_STAGE = {"stage": 3, "stage3_param_persistence_threshold": 0}  # every weight is sharded
_CONFIG: dict[str, Any] = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
_SUB_GROUP = 1 << 21  # elements of a rank, about, whose optimizer state is in memory at once


class Zero3:
    """One rank.

    Args:
        model: which is sharded.
        batch: examples of a step on this rank.
        settings: of `tba.attach`; None trains without it.
        files: a folder to which DeepSpeed offloads parameters and the optimizer's state, in bfloat16; None keeps them.
        rank, ranks: of this process, and in all.

    Attributes:
        module: what is trained.
        offload: the Offloader, if there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: int,
        settings: Mapping[str, Any] | None,
        *,
        files: Path | None,
        rank: int,
        ranks: int,
    ) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        config = _CONFIG | {"zero_optimization": _STAGE, "train_micro_batch_size_per_gpu": batch}
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if files is not None:
            config |= _in_files(files, largest=max(parameter.numel() for parameter in model.parameters()))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # which has a state
        self._waits_s = [] if files is None else _timed_waits()
        if settings is not None:
            config["tba"] = settings
        self.module, *_ = initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        self.offload = self.module.offload
        self._before: dict[str, float] = {}
        self._parts_s: dict[str, float] = {}

    def step(self, tokens: Tensor) -> Tensor:
        """Run forward, backward and the optimizer; return the loss."""
        self._before = self._swapped()
        begun_s = time.perf_counter()
        loss = loss_of(self.module(tokens), tokens)
        forward_s = time.perf_counter()
        self.module.backward(loss)
        backward_s = time.perf_counter()
        self.module.step()
        ended_s = time.perf_counter()
        self._parts_s = {
            "forward_s": forward_s - begun_s,
            "backward_s": backward_s - forward_s,
            "optimizer_s": ended_s - backward_s,
        }
        return loss

    def results(self) -> Iterator[Tensor]:
        """Yield each weight, gathered: no gradients are left after a step."""
        for parameter in self.module.parameters():
            with zero.GatheredParameters([parameter]):
                yield parameter

    def figures(self) -> dict[str, float]:
        """Return the last step's seconds by part, and what DeepSpeed has swapped since that began."""
        swapped = {name: value - self._before[name] for name, value in self._swapped().items()}
        return self._parts_s | swapped

    def close(self) -> None:
        """Close the Offloader, which is attached."""
        if self.offload is not None:
            self.offload.close()

    def _swapped(self) -> dict[str, float]:
        """Count so far: seconds that DeepSpeed waited for its files, and bytes of this process that are not tba's."""
        written, read = disk_bytes()
        if self.offload is not None:
            stats = self.offload.stats()
            written, read = written - stats.written_bytes, read - stats.read_bytes
        return {"swap_wait_s": sum(self._waits_s), "swapped_out_bytes": written, "swapped_in_bytes": read}


def _in_files(folder: Path, *, largest: int) -> dict[str, Any]:
    """Return the settings that offload to files in `folder`; `largest` is the number of elements of a parameter."""
    files = {"device": "nvme", "nvme_path": str(folder)}
    # All parameters that DeepSpeed does not keep go to files: those of which a rank has 1 MiB or more.
    parameters = files | {"buffer_size": largest, "max_in_cpu": 0}
    offloads = {"offload_optimizer": files, "offload_param": parameters, "sub_group_size": _SUB_GROUP}
    # A parameter is read again for backward: no more than a few are in memory at a time.
    live = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    # DeepSpeed 0.19 prefetches the head twice from its file, as forward and backward want it in turn, and fails.
    stage = _STAGE | offloads | live | {"stage3_prefetch_bucket_size": 0}
    # A model of float32 it would take for one of bfloat16 there.
    return {"zero_optimization": stage, "bf16": {"enabled": True}}


def _timed_waits() -> list[float]:
    """Have DeepSpeed time each wait for its files from now on; return the list to which the seconds are added."""
    waits_s: list[float] = []
    library = builder("AsyncIOBuilder").load(verbose=False)  # the one that DeepSpeed takes its handles from, too

    class Handle(library.aio_handle):  # type: ignore[misc, name-defined]  # a class of a run-time module
        def wait(self) -> int:
            begun_s = time.perf_counter()
            done: int = super().wait()
            waits_s.append(time.perf_counter() - begun_s)
            return done

    library.aio_handle = Handle
    return waits_s
