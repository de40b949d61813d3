"""Fixtures of tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tba import Offloader, offload_context


@pytest.fixture
def auto(scratch: Path, quick_limits: None) -> Iterator[Callable[..., Offloader]]:
    """Makes contexts of tier auto, which are closed at the end."""
    made = []

    def make(model: nn.Module | None, **settings: Any) -> Offloader:
        given: dict[str, Any] = {"min_tensor_bytes": 4096, "storage_paths": scratch} | settings
        offload = offload_context(model, "auto", **given)
        made.append(offload)
        return offload

    yield make
    for offload in made:
        offload.close()
