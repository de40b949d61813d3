"""Tools of a training: the state of its optimizer, a hash of its gradients, and the folder of its scratch file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer


def make_state(optimizer: Optimizer, parameters: Iterable[Tensor], learning_rate: float) -> Optimizer:
    """Make the state of these parameters now, so that it counts as idle and not in a step's peak; then set the rate.

    The optimizer, which is returned, was made with a rate of 0.
    """
    for parameter in parameters:
        # A step on a gradient of zeros at rate 0 makes the state and changes nothing. One parameter at a time: all
        # gradients at once would leave the allocator free memory that hides part of a step's peak.
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        parameter.grad = None
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    return optimizer


def empty_hooks() -> torch.autograd.graph.saved_tensors_hooks:
    """Make a pair of saved-tensor hooks that do nothing: the minimum that any offloading costs."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def gradient_hash(parameters: Iterable[Tensor]) -> str:
    """Hash the bytes of all gradients in the order of the parameters: the first 16 hex digits of a sha256."""
    digest = hashlib.sha256()
    for parameter in parameters:
        if parameter.grad is not None:
            digest.update(memoryview(parameter.grad.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()[:16]


def scratch_directory(paths: tuple[Path, ...] | None) -> Path:
    """Return the folder for scratch files: the first storage path of the settings, else `out/scratch`."""
    if paths:
        return paths[0]
    directory = Path("out", "scratch").absolute()
    directory.mkdir(parents=True, exist_ok=True)
    return directory
