"""Arms: the settings that a row of the matrix is trained with, and what one training gives to compare."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from support.clock import Counted, put
from tba import Offloader, OffloadStats, TraceEvent

STEPS = 3
# Tiny models: what is worth moving here is small, and little is held back, so that bytes reach the disk.
_SMALL = {"min_tensor_bytes": "8KiB", "prefetch_bytes": "32KiB", "staging_bytes": "1MiB"}
# Settings of a training in one process.
SMALL = {"tier": "nvme", "min_tensor_bytes": "8KiB", "prefetch_bytes": "32KiB"}
ARMS: dict[str, dict[str, Any] | None] = {
    "alone": None,
    "nvme": {"tier": "nvme", **_SMALL},
    "exact": {"tier": "nvme", "compress": "exact", **_SMALL},
    "safe8": {"tier": "nvme", "compress": "safe8", **_SMALL},
    "auto": {"tier": "auto", **_SMALL},  # with a budget that the arm "nvme" tells
}


def zero(stage: int, batch: int | str = 3) -> dict[str, Any]:
    """A configuration of DeepSpeed with the optimizer that a program gives it."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }


class Cannot(Exception):
    """The framework cannot be trained here; the message says why, and goes into the table."""


class Lacking(Cannot):
    """This machine lacks what the framework needs; the message says what. The table keeps the line that it has."""


class Arm:
    """One training with one set of settings.

    Attributes:
        settings: those of `tba.attach`; None for the framework alone.
        scratch: a directory for files of the framework's own.
        losses: one for each step, as the framework tells it.
        weights: the parameters after the last step, by name.
        shapes: of the parameters, whole and sharded, as the model that trains has them.
    """

    def __init__(self, name: str, budget_bytes: int, scratch: Path) -> None:
        put(Counted())  # what is planned is the same on any machine
        given = ARMS[name]
        self.name = name
        self.scratch = scratch / name
        self.settings = None if given is None else given | {"storage_paths": scratch}
        if self.settings is not None and name == "auto":
            self.settings["memory_budget"] = budget_bytes
        self.losses: list[float] = []
        self.weights: dict[str, Tensor] = {}
        self.shapes: set[tuple[int, ...]] = set()
        self.stats: OffloadStats | None = None
        self.events: list[TraceEvent] = []
        self.recomputed = 0
        self._offload: Offloader | None = None
        self._trace = contextlib.ExitStack()

    def only_move(self) -> None:
        """Have nothing computed again in a compiled graph, which may meet its budget by that alone."""
        if self.settings is not None:
            self.settings["derive"] = False

    def watch(self, offload: Offloader | None, model: nn.Module) -> None:
        """Follow an Offloader from before the first step. Note what the parameters look like."""
        for parameter in model.parameters():
            self.shapes |= {tuple(tensor.shape) for tensor in (parameter, *inner(parameter))}
        if offload is not None:
            self._offload = offload
            self.events = self._trace.enter_context(offload.trace())

    def end(self, model: nn.Module, *, close: bool = False) -> None:
        """Note the weights and what was moved; close the Offloader where the framework does not."""
        for name, parameter in model.named_parameters():
            for number, tensor in enumerate(inner(parameter)):
                self.weights[f"{name} {number}"] = tensor.detach().clone()
        if self._offload is not None:
            self.stats = self._offload.stats()
            self.recomputed = len(getattr(self._offload.plan, "recomputed", ()) or ())
            self._trace.close()
            if close:
                self._offload.close()
            self._offload = None

    def parameters_saved(self) -> list[str]:
        """Name what was to move, written in time or not, and has the shape of a parameter or of its transpose."""
        shapes = {shape for shape in self.shapes if len(shape) > 1}
        shapes |= {tuple(reversed(shape)) for shape in shapes}
        saved = {event.label.partition(" #")[0] for event in self.events if event.kind == "saved"}
        return sorted(label for label in saved if _shape(label) in shapes)


def _shape(label: str) -> tuple[int, ...]:
    """Read the shape in a label such as `float32[8, 256] #17`."""
    inside = label.partition("[")[2].rpartition("]")[0]
    return tuple(int(part) for part in inside.split(",") if part.strip())


def inner(tensor: Tensor) -> list[Tensor]:
    """List the plain tensors in a wrapper, such as a DTensor's local shard; a plain tensor alone."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts = (getattr(tensor, name) for name in names)
    return [plain for part in parts if isinstance(part, Tensor) for plain in inner(part)]


def alive() -> list[str]:
    """List what an Offloader leaves behind if it has not ended: threads, and scratch files that are held open."""
    gc.collect()
    found = [f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("tba-")]
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.endswith(" (deleted)") and "tba" in target:
                found.append(f"file {target}")
    return found


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two trainings have ended with the same weights, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def batches(vocabulary: int, shape: tuple[int, int], seed: int = 3, count: int = STEPS) -> Iterable[Tensor]:
    """Yield token ids, the same in every arm."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randint(0, vocabulary, shape, generator=generator)
