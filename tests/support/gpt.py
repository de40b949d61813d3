"""The GPT of the benchmarks, for tests that need a plain model."""

from benchmarks._workload.gpt import GPT, Block, GPTConfig

__all__ = ["GPT", "Block", "GPTConfig"]
