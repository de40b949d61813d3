"""Training: the card memory of weights, gradients and optimizer, and the time of the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .._errors import ConfigError
from .._text import size
from .hardware import Device
from .observe import Observed


@dataclass(frozen=True)
class Optimizer:
    """An optimizer.

    Attributes:
        state_bytes: the size of its states, from the trained parameters' bytes and number of elements.
        work_bytes: the maximum of temporary memory in its step, from their bytes: PyTorch's updates all at once.
        about: in words.
    """

    name: str
    state_bytes: Callable[[int, int], int]
    work_bytes: Callable[[int], int]
    about: str


_OPTIMIZERS = (
    Optimizer("adamw", lambda nbytes, _: 2 * nbytes, lambda nbytes: nbytes, "two states of the weights' dtype"),
    Optimizer("adamw-fp32", lambda _, count: 8 * count, lambda nbytes: nbytes, "two states in float32"),
    Optimizer(
        "adamw-master", lambda _, count: 12 * count, lambda nbytes: nbytes, "those and a float32 copy of weights"
    ),
    Optimizer("sgd", lambda _, __: 0, lambda _: 0, "no states"),
)
OPTIMIZERS = {each.name: each for each in _OPTIMIZERS}


@dataclass(frozen=True)
class Training:
    """A training's memory on one card, without saved tensors, in bytes.

    Attributes:
        weights, gradients, states: the shard on this card.
        gathered: whole blocks: one in use, one prefetched, and a gradient; and what is in no block, which stays
            gathered from forward to the end of backward, and its gradients. 0 unless sharded.
        work: operator workspace, including the logits, and saved tensors that are too small to move.
        optimizer_work: maximum of temporary memory in the optimizer's step.
        optimizer_s: time of that step.
    """

    weights: int
    gradients: int
    states: int
    gathered: int
    work: int
    optimizer_work: int
    optimizer_s: float

    @property
    def always(self) -> int:
        """Bytes in memory from step to step; gradients count in full, as if they accumulate."""
        return self.weights + self.gradients + self.states

    def left_bytes(self, device: Device) -> int:
        """Bytes left for saved tensors; below 0 if there are none."""
        return device.memory_bytes - self.always - self.gathered - self.work

    def shortage(self, device: Device) -> str:
        """Say why the card is too small before any saved tensor, and what would help; "" if it is not."""
        left, optimizer = self.left_bytes(device), self.always + self.optimizer_work
        if left > 0 and optimizer <= device.memory_bytes:
            return ""
        return (
            f"{device.name} has {size(device.memory_bytes)}, but before any saved tensor this training needs "
            f"{size(max(device.memory_bytes - left, optimizer))}: weights {size(self.weights)}, gradients "
            f"{size(self.gradients)}, optimizer {size(self.states)}, gathered weights {size(self.gathered)}, "
            f"operator workspace {size(self.work)} (the optimizer's step {size(self.optimizer_work)}). Make "
            "batch or sequence smaller, use --dtype bfloat16, another --optimizer, --fsdp or --tp with more "
            "ranks, or a card with more memory"
        )


def training(observed: Observed, device: Device, optimizer: str, shards: int) -> Training:
    """Count a training's memory on one of `shards` cards. Raises ConfigError for an unknown optimizer."""
    kind = OPTIMIZERS.get(optimizer)
    if kind is None:
        known = ", ".join(f"{each.name} ({each.about})" for each in _OPTIMIZERS)
        raise ConfigError(f"--optimizer {optimizer!r} is not known; known are {known}")
    states = kind.state_bytes(observed.trained_bytes, observed.trained)
    # Each weight and state is read and written, each gradient read.
    passed = 3 * observed.trained_bytes + 2 * states
    return Training(
        weights=observed.weight_bytes // shards,
        gradients=observed.trained_bytes // shards,
        states=states // shards,
        gathered=3 * observed.block_weight_bytes + 2 * observed.outside_weight_bytes if shards > 1 else 0,
        work=observed.other_bytes,
        optimizer_work=kind.work_bytes(observed.trained_bytes) // shards,
        optimizer_s=passed / shards / device.memory_bytes_per_s,
    )
