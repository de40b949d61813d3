"""Tools of a training: its optimizer, a hash of its gradients, and the folder of its scratch file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn


def make_optimizer(model: nn.Module, kind: str, learning_rate: float) -> torch.optim.Optimizer:
    """Make the optimizer with its state in place, so that the state counts as idle and not as a step's peak."""
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=learning_rate)
    if kind != "adamw":
        raise ValueError(f"unknown optimizer {kind!r}; known are sgd, adamw")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        # A step on a gradient of zeros at rate 0 makes the state and changes nothing. One parameter at a time: a
        # whole set of gradients would leave the allocator room that a step could use unseen.
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        parameter.grad = None
    optimizer.param_groups[0]["lr"] = learning_rate
    return optimizer


def gradient_hash(model: nn.Module) -> str:
    """Hash the bytes of all gradients in the order of the parameters: the first 16 hex digits of a sha256."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.grad is not None:
            digest.update(memoryview(parameter.grad.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()[:16]


def scratch_directory(paths: tuple[Path, ...] | None) -> Path:
    """The folder for the file of a store made here: the first storage path of the settings, else `out/scratch`."""
    if paths:
        return paths[0]
    directory = Path("out", "scratch").absolute()
    directory.mkdir(parents=True, exist_ok=True)
    return directory
