"""Small members of five families of models, with a batch each, for tests of forecasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from support.models import transformer

WIDTH, HEADS, VOCAB, BATCH, SEQUENCE, LEAST_BYTES = 64, 4, 97, 4, 64, 4096


def language(name: str, **fields: Any) -> Callable[[], tuple[nn.Module, Any]]:
    """Make a function that makes a model of transformers, of this class, and tokens as its labels."""

    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = transformer(name, vocab=VOCAB, width=WIDTH, heads=HEADS, **fields).train()
        tokens = torch.randint(VOCAB, (BATCH, SEQUENCE))
        return model, {"input_ids": tokens, "labels": tokens}

    return make


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(x + self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.layers = nn.ModuleList(Residual() for _ in range(4))
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def conv() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return ConvNet(), (torch.randn(BATCH, 3, 16, 16), torch.randint(10, (BATCH,)))


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": language("GPT2LMHeadModel", layers=3, positions=SEQUENCE),
    "bert": language("BertForMaskedLM", layers=3, inner=160),
    "t5": language("T5ForConditionalGeneration", layers=2, inner=256, d_kv=16),
    "llama": language("LlamaForCausalLM", layers=3, inner=172, num_key_value_heads=2),
    "conv": conv,
}
