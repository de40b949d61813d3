"""Sizes of the model that the benchmarks train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .gpt import GPTConfig


@dataclass(frozen=True, kw_only=True)
class Model(GPTConfig):
    """A size to measure, the sequences of a batch, and the fields of `OffloadConfig` that it is offloaded with."""

    batch: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        return f"GPT {self.name}, {self.heads} heads, sequence {self.sequence}, batch {self.batch}"

    def options(self) -> dict[str, Any]:
        return asdict(self)


CPU_MODELS = {
    "24x256": Model(layers=24, width=256, heads=8, sequence=256, batch=8),
    "8x512": Model(layers=8, width=512, heads=8, sequence=512, batch=4),
}
# In bf16: 4 GiB and 26 GB of activations a step.
CUDA_MODELS = {
    "16x1024": Model(layers=16, width=1024, heads=16, sequence=1024, batch=8),
    "24x2048": Model(layers=24, width=2048, heads=16, sequence=2048, batch=8),
}
# The size and settings of `--quick`. Every tensor moves. With so little read-ahead almost nothing is held back, and
# with so little in flight forward waits for the writes: bytes go through the file even in a very short step.
TINY_SETTINGS = {"min_tensor_bytes": 0, "staging_bytes": 1 << 16, "prefetch_bytes": 1 << 16}
TINY = Model(layers=3, width=64, heads=2, sequence=64, batch=4, settings=TINY_SETTINGS)
