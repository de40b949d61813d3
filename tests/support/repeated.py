"""A step that is repeated under an engine, for tests of what breaks into it, and the check that the engine is whole."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import io_backends
import tba
from io_backends import interrupts
from support.engine import in_flight
from support.exactness import assert_bit_equal
from support.planned import gradients
from tba import OffloadConfig, Offloader
from tba._torch import private
from tba._torch.hook_stack import owners

# Where the engine's own files are.
ENGINE = tuple(os.path.join(os.path.dirname(package.__file__ or ""), "") for package in (tba, io_backends))
# Of an engine that waits for room and evicts in each step.
SCARCE = {"tier": "nvme", "staging_bytes": 1 << 15, "prefetch_bytes": 1 << 14}


class Attention(nn.Module):
    """Saves views, weights, duplicates and small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).square().sum()


class Repeated:
    """A model under an engine, and what its gradients are to be."""

    def __init__(self, offload: Offloader, model: nn.Module) -> None:
        self.offload, self.model, self.x = offload, model, torch.randn(2, 16, 16)
        self._entered: AbstractContextManager[object] = nullcontext() if offload.tied else offload
        for _ in range(2):
            self.step()
        self.expected = gradients(model)
        gc.collect()
        gc.freeze()  # with what the first steps imported: each of many checks collects

    def step(self) -> None:
        """Forward in the context, what is queued written, backward outside of it, a look at the counts."""
        self.model.zero_grad()
        with self._entered:
            loss = self.model(self.x)
        self.offload.flush()
        loss.backward()
        del loss
        self.offload.stats()

    def check_gradients(self) -> None:
        assert_bit_equal(gradients(self.model), self.expected)

    def check(self) -> None:
        """The next step is exact, and nothing is left of it or of what broke into the one before."""
        self.step()
        self.check_gradients()
        assert private.top_hooks(True) is None
        assert not owners()
        assert not interrupts._armed
        gc.collect()
        stats = self.offload.stats()
        assert (stats.live_records, stats.resident_bytes) == (0, 0)
        assert in_flight(self.offload) == (0, 0, 0)


@contextmanager
def repeated(scratch: Path, *, attached: bool = False, **settings: Any) -> Iterator[Repeated]:
    """Such a step under an engine with these settings, which is closed at the end."""
    torch.manual_seed(0)
    model = Attention()
    config = OffloadConfig(storage_paths=scratch, min_tensor_bytes=0, io_timeout=5.0, **settings)
    offload = tba.attach(model, config=config) if attached else Offloader(model, config)
    try:
        yield Repeated(offload, model)
    finally:
        offload.close()
        while private.top_hooks(True) is not None:  # of a test that has failed
            private.pop_hooks()
