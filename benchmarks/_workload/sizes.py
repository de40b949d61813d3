"""Sizes of the model that the benchmarks train."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Model:
    """A size to measure: fields of `GPTConfig`, and the sequences of a batch."""

    layers: int
    width: int
    heads: int
    sequence: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.layers}x{self.width}"

    def describe(self) -> str:
        return f"GPT {self.name}, {self.heads} heads, sequence {self.sequence}, batch {self.batch}"

    def options(self) -> dict[str, int]:
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
# The size and settings of `--quick`. Every tensor is moved. With so little read-ahead next to nothing is held back for
# it, and with so little in flight forward waits for the writes: bytes go through the file however short the step is.
TINY = Model(layers=3, width=64, heads=2, sequence=64, batch=4)
TINY_SETTINGS = {"min_tensor_bytes": 0, "staging_bytes": 1 << 16, "prefetch_bytes": 1 << 16}
