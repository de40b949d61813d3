"""Moving peers: saved-tensor hooks of others that put tensors into host memory or files, and tba itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from .._workload.accelerator import in_use
from .peer import Wrapper, within

# Every tensor moves, however small, and almost nothing is held back for backward.
_ALL = {"min_tensor_bytes": 0, "staging_bytes": 1 << 16, "prefetch_bytes": 1 << 16}


def host_memory(model: nn.Module | None, scratch: Path) -> Wrapper:
    """PyTorch's `save_on_cpu`. On a CPU it cannot move a tensor anywhere, and keeps it."""
    # Pinned if the training is on a device; a machine with a GPU may also train on its CPU.
    return within(lambda: save_on_cpu(pin_memory=in_use() is not None))


def files(model: nn.Module | None, scratch: Path) -> Wrapper:
    """The hooks of PyTorch's tutorial on saved tensors: a file for each tensor, deleted with its last owner."""
    numbers = itertools.count()

    class File:
        def __init__(self, tensor: Tensor) -> None:
            self.path = scratch / f"{next(numbers)}.pt"
            torch.save(tensor, self.path)

        def __del__(self) -> None:
            self.path.unlink(missing_ok=True)

    return within(lambda: saved_tensors_hooks(File, lambda file: torch.load(file.path)))


def torchtune(model: nn.Module | None, scratch: Path) -> Wrapper:
    """Put saved tensors on the host, as torchtune's recipes do with `enable_activation_offloading`."""
    from torchtune.training import OffloadActivations

    context = OffloadActivations()
    return within(lambda: context)


def trl(model: nn.Module | None, scratch: Path) -> Wrapper:
    """Put saved tensors on the host, as TRL's trainers do with `activation_offloading=True`."""
    from trl.models.activation_offloading import OffloadActivations, get_act_offloading_ctx_manager

    # Made once: each call puts another pair of hooks on the model's head, which it finds in the library's own model.
    inner = getattr(model, "model", model)
    context = OffloadActivations() if inner is None else get_act_offloading_ctx_manager(inner)
    return within(lambda: context)


def ours(**settings: Any) -> Callable[[nn.Module | None, Path], Wrapper]:
    """Return the maker of tba's own context; without a model, every tensor moves."""

    def make(model: nn.Module | None, scratch: Path) -> Wrapper:
        from tba import offload_context

        every = _ALL if model is None and settings.get("tier") != "auto" else {}
        context = offload_context(model, storage_paths=[str(scratch)], **every, **settings)
        return within(lambda: context)

    return make
