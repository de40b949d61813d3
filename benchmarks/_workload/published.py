"""Published: steps on GPUs that others have measured and filed, to compare forecasts with.

MosaicML, llm-foundry, scripts/train/benchmarking/README.md: MPT models on 8 GPUs of 80 GB, fully sharded, bf16 under
autocast, without activation checkpointing. An MPT model is a GPT-2 with GELU and without dropout, biases and learned
positions, neither of which takes notable time.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "MosaicML llm-foundry, scripts/train/benchmarking/README.md, 8 GPUs, FULL_SHARD, no activation checkpointing"
GPUS = 8


@dataclass(frozen=True)
class Run:
    """A published run: the model's size, a GPU's micro-batch, and the tokens that a GPU took in a second."""

    name: str
    layers: int
    width: int
    heads: int
    sequence: int
    batch: int
    tokens_per_s: dict[str, float]

    def arguments(self) -> list[str]:
        """What `tba plan` is to be given for it."""
        fields = {
            "n_layer": self.layers,
            "n_embd": self.width,
            "n_head": self.heads,
            "n_positions": self.sequence,
            "vocab_size": 50432,
            "activation_function": "gelu",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0),
        }
        given = [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]
        sizes = ["--batch", str(self.batch), "--sequence", str(self.sequence), "--dtype", "bfloat16"]
        return ["gpt2", *given, *sizes, "--shards", str(GPUS), "--disk", "none"]


RUNS = (
    Run("760m", 24, 1536, 16, 2048, 24, {"h100": 63147, "a100": 32434}),
    Run("1b", 24, 2048, 16, 2048, 14, {"h100": 45455, "a100": 20513}),
    Run("1b", 24, 2048, 16, 4096, 7, {"h100": 38535, "a100": 17807}),
    Run("3b", 32, 2560, 20, 1024, 20, {"h100": 27046, "a100": 11580}),
    Run("3b", 32, 2560, 20, 4096, 5, {"h100": 20964, "a100": 9457}),
    Run("7b", 32, 4096, 32, 2048, 6, {"h100": 10643, "a100": 4641}),
    Run("13b", 40, 5120, 40, 2048, 2, {"h100": 4792, "a100": 2262}),
)
