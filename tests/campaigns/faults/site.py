"""Site: the surroundings of a trial: steps of a small GPT, and the store of a case with its directories.

Steps are the same with and without offloading, to the last bit: data, dropout and weights depend on the step alone.
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._workload.gpt import GPT
from benchmarks._workload.tools import gradient_hash
from io_backends import HostStore, PosixStore, Store, StripedStore, Syscalls, TwoLevelStore
from io_backends.testing import Fault, FaultyStore, Operation
from support.stores import Copying
from tba import OffloadConfig, Offloader

from .cases import MODELS, Case

Seen = tuple[str, ...]  # the losses of a step, exactly, and the hash of its gradients

# Host memory of a two-level store: room for a few tensors, so that most are spilled.
_HOST_BYTES = 1 << 16


# -- training --------------------------------------------------------------------------------------------------------


def make_model(name: str, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a model of `MODELS` on a device, with equal weights each time, and its optimizer."""
    torch.manual_seed(0)
    model = GPT(MODELS[name][0]).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def forward(model: nn.Module, name: str, forwards: int, step: int) -> list[Tensor]:
    """Compute the losses of a step's batches."""
    config, batch = MODELS[name]
    device = next(model.parameters()).device
    data = torch.Generator().manual_seed(1000 + step)
    torch.manual_seed(2000 + step)  # dropout
    losses = []
    for _ in range(forwards):
        tokens = torch.randint(config.vocab, (batch, config.sequence + 1), generator=data).to(device)
        losses.append(model(tokens[:, :-1], tokens[:, 1:]))
    return losses


def backward(losses: list[Tensor], *, retained: bool) -> None:
    """Run backward over each loss, twice where the graph is retained."""
    for loss in losses:
        if retained:
            loss.backward(retain_graph=True)
        loss.backward()


def seen_of(model: nn.Module, losses: list[Tensor]) -> Seen:
    """Describe the result of a step exactly: its losses and the hash of its gradients."""
    return *(float(loss.detach()).hex() for loss in losses), gradient_hash(model.parameters())


@cache
def plain_steps(
    name: str, device: torch.device, steps: int, forwards: int, retained: bool
) -> list[tuple[Seen, dict[str, Any]]]:
    """Run the steps in plain PyTorch; list each one's result, and the weights that the next begins with."""
    model, optimizer = make_model(name, device)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        losses = forward(model, name, forwards, step)
        backward(losses, retained=retained)
        optimizer.step()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        found.append((seen_of(model, losses), weights))
    return found


@cache
def size_of(name: str, device: torch.device, directory: Path) -> tuple[int, int]:
    """Count the bytes and transfers that a forward hands to the store, by running one without faults."""
    transfers = 0

    def plan(operation: Operation, number: int) -> Fault | None:
        nonlocal transfers
        transfers += operation == "write"
        return None

    config = OffloadConfig(tier="nvme", min_tensor_bytes=0, prefetch_bytes=0)
    model, _ = make_model(name, device)
    offload = Offloader(model, config, store=FaultyStore(PosixStore(directory), plan))
    with offload:
        losses = forward(model, name, 1, 0)
    offload.flush()
    backward(losses, retained=False)
    offloaded_bytes = offload.stats().offloaded_bytes
    offload.close()
    return offloaded_bytes, transfers


# -- stores ----------------------------------------------------------------------------------------------------------


class Site:
    """Directories below `place`, and the store of `case` over them for tensors of a device."""

    def __init__(self, case: Case, place: Path, device: torch.device) -> None:
        self._case, self._device = case, device
        self._directories = [place / name for name in (("one", "two") if case.store == "striped" else ("one",))]
        for directory in self._directories:
            directory.mkdir()
        self._ballast = place / "ballast"
        if case.kind == "disk full":  # some of it is taken from the start
            taken_bytes = int((0.4 + 0.6 * case.amount) * shutil.disk_usage(place).free)
            with self._ballast.open("wb") as ballast:
                os.posix_fallocate(ballast.fileno(), 0, taken_bytes)
        self._files: list[PosixStore] = []
        self._levels: list[TwoLevelStore] = []

    def make_store(self, syscalls: Syscalls) -> Store:
        """The store, not opened."""
        case = self._case
        self._files = [
            PosixStore(
                directory,
                threads=case.threads,
                checksum=case.checksum,
                timeout_s=case.io_timeout_s,
                syscalls=syscalls,
            )
            for directory in self._directories
        ]
        if case.store == "striped":
            return StripedStore(self._files)
        if case.store == "posix":
            return self._files[0]
        host = HostStore(timeout_s=case.io_timeout_s)
        self._levels = [TwoLevelStore(host, self._files[0], _HOST_BYTES, timeout_s=case.io_timeout_s)]
        # The memory of a CPU's tensor is the program's, too; what comes from a device is the store's alone.
        return Copying(self._levels[0]) if self._device.type == "cpu" else self._levels[0]

    def used_bytes(self) -> int:
        """Bytes of writes not yet discarded, in files and host memory."""
        return sum(store.used_bytes for store in self._files) + sum(store.host_bytes for store in self._levels)

    def remove(self) -> bool:
        """Remove the directories; return False if they are gone already."""
        there = [directory for directory in self._directories if directory.exists()]
        for directory in there:
            directory.rmdir()
        return bool(there)

    def clear(self) -> list[str]:
        """Remove everything; list the files that a store has left."""
        self._ballast.unlink(missing_ok=True)
        there = [directory for directory in self._directories if directory.exists()]
        left = [f"file {path.name} is left" for directory in there for path in directory.iterdir()]
        for directory in there:
            shutil.rmtree(directory)
        return left
