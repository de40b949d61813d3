"""Tools of a training: the state of its optimizer, a hash of its gradients, and the folder of its scratch file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20  # elements summed at once: a piece takes 16 MiB beside them
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # neighbours get factors that have nothing in common


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
    """Hash the gradients of parameters, as `tensor_hash` does."""
    return tensor_hash(parameter.grad for parameter in parameters if parameter.grad is not None)


def tensor_hash(tensors: Iterable[Tensor]) -> str:
    """Hash the bytes of all tensors, in their order: the first 16 hex digits of a sha256.

    On a device, sums of a tensor's bytes take its place: the host would need longer for the bytes than for a step. Of a
    DTensor only the part counts that this rank holds.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        found = local(tensor.detach()).contiguous().view(-1)
        found = found.view(torch.uint8) if found.is_cpu else sums(found).cpu().view(torch.uint8)
        digest.update(memoryview(found.numpy()))
    return digest.hexdigest()[:16]


def local(tensor: Any) -> Any:
    """Return the part of a DTensor that this rank holds; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sums(flat: Tensor) -> Tensor:
    """Sum the elements of a vector as integers, each times an odd number of its place: int64, one for each piece.

    Modulo 2**64 the order of an addition makes no difference, and any other bits of one element make another sum.
    """
    whole = flat.view(_INTEGERS[flat.element_size()])
    odd = torch.arange(min(_PIECE, len(whole)), device=flat.device).mul_(_ODD).bitwise_or_(1)
    return torch.stack([(piece.long() * odd[: len(piece)]).sum() for piece in whole.split(_PIECE)])


def scratch_directory(paths: tuple[Path, ...] | None) -> Path:
    """Return the folder for scratch files: the first storage path of the settings, else `out/scratch`."""
    if paths:
        return paths[0]
    directory = Path("out", "scratch").absolute()
    directory.mkdir(parents=True, exist_ok=True)
    return directory
