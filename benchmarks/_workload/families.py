"""Families: small members of five families of models, each trained on random data: GPT, BERT, T5, Llama, a conv net.

Sizes are such that a step takes about a second on two cores and saves some hundred MiB, in storages of 1 to 8 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as recompute

from .gpt import GPT
from .sizes import Model

_VOCAB, _WIDTH, _HEADS, _BATCH, _SEQUENCE = 512, 256, 8, 8, 256
_CLASSES, _CHANNELS, _PIXELS = 10, 64, 32
_BLOCKS = frozenset({"Block", "BertLayer", "T5Block", "LlamaDecoderLayer", "_Residual"})
BATCH = _BATCH  # examples of the benchmark's own batch


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        describe: what is trained.
        make: gives a model of so many layers, or its own number for None, which recomputes each block if asked to; its
            forward takes a batch and returns the loss.
        batch: gives a batch by its index and size, in examples.
        unit: what throughput counts.
    """

    describe: str
    make: Callable[[bool, int | None], nn.Module]
    batch: Callable[[int, int], tuple[Tensor, ...]]
    unit: str = "tokens"

    def units(self, batch: tuple[Tensor, ...]) -> int:
        """Count the tokens, or the images, of a batch."""
        return batch[0].numel() if self.unit == "tokens" else len(batch[0])


def blocks(model: nn.Module) -> list[nn.Module]:
    """Find the blocks of a model of any family, in order: what checkpointing is usually put around."""
    return [module for module in model.modules() if type(module).__name__ in _BLOCKS]


class _Language(nn.Module):
    """A model of transformers whose labels are its tokens: tokens [B, S], int64 -> loss, a scalar."""

    def __init__(self, kind: str, *, checkpoint: bool, **fields: Any) -> None:
        super().__init__()
        import transformers

        config = getattr(transformers, f"{kind}Config")(vocab_size=_VOCAB, **fields)
        name = {"Bert": "BertForMaskedLM", "T5": "T5ForConditionalGeneration", "Llama": "LlamaForCausalLM"}[kind]
        self.model = getattr(transformers, name)(config).train()
        if checkpoint:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


class _Residual(nn.Module):
    """Two convolutions with group norm, and a shortcut: [B, C, H, W] -> [B, C, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(8, _CHANNELS)
        self.second = nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(8, _CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.silu(self.first_norm(self.first(x)))
        return functional.silu(x + self.second_norm(self.second(inner)))


class _ConvNet(nn.Module):
    """A residual network: images [B, 3, H, W] and labels [B], int64 -> loss, a scalar."""

    def __init__(self, layers: int, *, checkpoint: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, _CHANNELS, 3, padding=1)
        self.layers = nn.ModuleList(_Residual() for _ in range(layers))
        self.head = nn.Linear(_CHANNELS, _CLASSES)
        self._checkpoint = checkpoint

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = recompute(layer, x, use_reentrant=False) if self._checkpoint else layer(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def _tokens(sequence: int) -> Callable[[int, int], tuple[Tensor, ...]]:
    def batch(index: int, size: int = _BATCH) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(index)
        return (torch.randint(_VOCAB, (size, sequence), generator=generator),)

    return batch


def _next_tokens(index: int, size: int = _BATCH) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(256, (size, _SEQUENCE + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _images(index: int, size: int = _BATCH) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(index)
    images = torch.randn(size, 3, _PIXELS, _PIXELS, generator=generator)
    return images, torch.randint(_CLASSES, (size,), generator=generator)


def _gpt(checkpoint: bool, layers: int | None = None) -> nn.Module:
    sizes = {"width": _WIDTH, "heads": _HEADS, "sequence": _SEQUENCE, "batch": _BATCH}
    return GPT(Model(layers=layers or 12, **sizes), checkpoint=checkpoint)


def _bert(checkpoint: bool, layers: int | None = None) -> nn.Module:
    sizes = {"hidden_size": _WIDTH, "num_attention_heads": _HEADS, "intermediate_size": 1024}
    return _Language("Bert", checkpoint=checkpoint, num_hidden_layers=layers or 8, **sizes)


def _t5(checkpoint: bool, layers: int | None = None) -> nn.Module:
    # Half of them in the encoder, half in the decoder.
    sizes = {"d_model": _WIDTH, "d_kv": 32, "d_ff": 1024, "num_layers": (layers or 8) // 2, "num_heads": _HEADS}
    return _Language("T5", checkpoint=checkpoint, use_cache=False, decoder_start_token_id=0, **sizes)


def _llama(checkpoint: bool, layers: int | None = None) -> nn.Module:
    sizes = {"hidden_size": _WIDTH, "intermediate_size": 688, "num_attention_heads": _HEADS, "num_key_value_heads": 4}
    return _Language("Llama", checkpoint=checkpoint, use_cache=False, num_hidden_layers=layers or 8, **sizes)


def _conv(checkpoint: bool, layers: int | None = None) -> nn.Module:
    return _ConvNet(layers or 10, checkpoint=checkpoint)


FAMILIES = {
    "gpt": Family(f"GPT, 12 x {_WIDTH}, sequence {_SEQUENCE}, batch {_BATCH}", _gpt, _next_tokens),
    "bert": Family(f"BERT, 8 x {_WIDTH}, sequence {_SEQUENCE}, batch {_BATCH}", _bert, _tokens(_SEQUENCE)),
    "t5": Family(f"T5, 4 + 4 x {_WIDTH}, sequence 128, batch {_BATCH}", _t5, _tokens(128)),
    "llama": Family(f"Llama, 8 x {_WIDTH}, sequence {_SEQUENCE}, batch {_BATCH}", _llama, _tokens(_SEQUENCE)),
    "conv": Family(
        f"a residual network, 10 x {_CHANNELS} channels, {_PIXELS} x {_PIXELS}, batch {_BATCH}",
        _conv,
        _images,
        "images",
    ),
}
