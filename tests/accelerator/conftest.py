"""The accelerator made of a CPU as a fixture: as configured by default, and with nothing of the test left on it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from support import accelerator


@pytest.fixture
def device() -> torch.device:
    return torch.device("sim", 0)


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    if reason := accelerator.why_not():
        pytest.skip(reason)
    module = accelerator.load()
    accelerator.configure()
    yield module
    accelerator.configure()
    gc.collect()
    for device in range(module.device_count()):
        module.synchronize(device)
    module.empty_cache()
