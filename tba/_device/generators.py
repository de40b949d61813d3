"""Generators: the random state of this process's devices, read and set, by device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .kinds import active, has_streams, module_of


class DeviceStates:
    """The random states of all devices of this process's accelerator; empty while none is in use.

    Attributes:
        kind: of device.
    """

    def __init__(self) -> None:
        found = active()
        self.kind: str | None = None if found is None else found[0]
        self._states: list[Tensor] = []
        if found is not None:
            self._states = [found[1].get_rng_state(index) for index in range(found[1].device_count())]

    def restore(self) -> None:
        if self.kind is not None:
            module = module_of(self.kind)
            for index, state in enumerate(self._states):
                module.set_rng_state(state, index)

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Undo what a region changes of them, and of the host's generator."""
        devices = range(len(self._states))
        with torch.random.fork_rng(devices, device_type=self.kind) if self.kind else torch.random.fork_rng([]):
            yield

    def seed(self, seed: int) -> None:
        for index in range(len(self._states)):
            assert self.kind is not None
            generator_of(torch.device(self.kind, index)).manual_seed(seed)


def has_generator(device: torch.device) -> bool:
    """Whether operators on a device may draw from the device's own generator."""
    return device.type == "cpu" or has_streams(device.type)


def generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = module_of(device.type)
    index = module.current_device() if device.index is None else device.index
    found: torch.Generator = module.default_generators[index]
    return found
