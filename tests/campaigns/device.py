"""Device: where the cases of a campaign train. On the simulated one kernels and copies start late, at random."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import typer

from support import accelerator
from support.exactness import CPU

Device = Annotated[
    Literal["cpu", "simulated"], typer.Option(help="Where to train; simulated: an accelerator made of a CPU.")
]
_DELAY_S = 0.0005  # some twenty times what a kernel or a copy of a campaign takes


def check_device(name: str) -> None:
    """Refuse a device that cannot be had. Raises BadParameter."""
    if name != "cpu" and (reason := accelerator.why_not()):
        raise typer.BadParameter(reason)


def theme_of(name: str, device: str) -> str:
    """Name a result; those of a device have names of their own, as benchmarks' have."""
    return name if device == "cpu" else f"{name}-{accelerator.NAME}"


def open_device(name: str) -> torch.device:
    """Return the device of that name, on which this process computes."""
    if name == "cpu":
        return CPU
    accelerator.load()
    return torch.device(accelerator.NAME, 0)


def shuffle(device: torch.device, seed: int) -> None:
    """Draw the delays of a device anew."""
    if device.type == accelerator.NAME:
        accelerator.configure(delay_s=_DELAY_S, seed=seed)
