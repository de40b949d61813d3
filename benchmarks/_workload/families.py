"""Families: members of five families of models, each trained on random data: GPT, BERT, T5, Llama, a conv net.

A step of a small member takes about a second on two cores and saves some hundred MiB, in storages of 1 to 8 MiB. The
large ones are for a GPU.
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

_VOCAB, _CLASSES = 512, 10
_BLOCKS = frozenset({"Block", "BertLayer", "T5Block", "LlamaDecoderLayer", "_Residual"})


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of all families' members; `channels` and `pixels` (a side of the images) are the residual network's."""

    layers: int
    width: int
    heads: int
    sequence: int
    batch: int
    channels: int
    pixels: int


SMALL = Shape(layers=8, width=256, heads=8, sequence=256, batch=8, channels=64, pixels=32)
# As wide as a model of 7 billion parameters, so that a GPU computes and does not wait for launches. In bf16, a step of
# 8,192 tokens saves about 8 GB, and hashing the gradients takes two seconds.
LARGE = Shape(layers=6, width=4096, heads=32, sequence=2048, batch=4, channels=256, pixels=64)


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        describe: what is trained.
        make: takes whether to recompute each block, and the number of layers (None: its own); returns a model whose
            forward takes a batch and returns the loss.
        batch: returns a batch by its index and its size in examples.
        examples: number of examples in the benchmark's own batch.
        unit: what throughput counts.
    """

    describe: str
    make: Callable[[bool, int | None], nn.Module]
    batch: Callable[[int, int], tuple[Tensor, ...]]
    examples: int
    unit: str = "tokens"

    def units(self, batch: tuple[Tensor, ...]) -> int:
        """Count the tokens, or the images, of a batch."""
        return batch[0].numel() if self.unit == "tokens" else len(batch[0])

    def of(self, layers: int | None) -> str:
        """Describe a model with this number of layers, without its batch."""
        described = self.describe.rpartition(", batch")[0]
        return described if layers is None else f"{described} (but {layers} layers)"


def blocks(model: nn.Module) -> list[nn.Module]:
    """Find the blocks of a model of any family, in order: what checkpointing usually wraps."""
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

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(8, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(8, channels)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.silu(self.first_norm(self.first(x)))
        return functional.silu(x + self.second_norm(self.second(inner)))


class _ConvNet(nn.Module):
    """A residual network: images [B, 3, H, W] and labels [B], int64 -> loss, a scalar."""

    def __init__(self, layers: int, channels: int, *, checkpoint: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(_Residual(channels) for _ in range(layers))
        self.head = nn.Linear(channels, _CLASSES)
        self._checkpoint = checkpoint

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = recompute(layer, x, use_reentrant=False) if self._checkpoint else layer(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def families(shape: Shape) -> dict[str, Family]:
    """Make the families' members of a shape."""
    s, layers, transformer = shape, shape.layers, f"{shape.width}, sequence {shape.sequence}, batch {shape.batch}"
    # A GPT saves least per layer, and a convolution computes most.
    deep, net, sequence = 3 * layers // 2, 5 * layers // 4, s.sequence // 2

    def tokens(sequence: int) -> Callable[[int, int], tuple[Tensor, ...]]:
        def batch(index: int, size: int = s.batch) -> tuple[Tensor, ...]:
            generator = torch.Generator().manual_seed(index)
            return (torch.randint(_VOCAB, (size, sequence), generator=generator),)

        return batch

    def next_tokens(index: int, size: int = s.batch) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(256, (size, s.sequence + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def images(index: int, size: int = s.batch) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(index)
        images = torch.randn(size, 3, s.pixels, s.pixels, generator=generator)
        return images, torch.randint(_CLASSES, (size,), generator=generator)

    def gpt(checkpoint: bool, layers: int | None = None) -> nn.Module:
        sizes = {"width": s.width, "heads": s.heads, "sequence": s.sequence, "batch": s.batch}
        return GPT(Model(layers=layers or deep, **sizes), checkpoint=checkpoint)

    def bert(checkpoint: bool, layers: int | None = None) -> nn.Module:
        sizes = {"hidden_size": s.width, "num_attention_heads": s.heads, "intermediate_size": 4 * s.width}
        sizes |= {"num_hidden_layers": layers or s.layers, "max_position_embeddings": max(512, s.sequence)}
        return _Language("Bert", checkpoint=checkpoint, **sizes)

    def t5(checkpoint: bool, layers: int | None = None) -> nn.Module:
        # Half of the layers are in the encoder, half in the decoder.
        sizes = {"d_model": s.width, "d_kv": s.width // s.heads, "d_ff": 4 * s.width, "num_heads": s.heads}
        sizes |= {"num_layers": (layers or s.layers) // 2, "decoder_start_token_id": 0}
        return _Language("T5", checkpoint=checkpoint, use_cache=False, **sizes)

    def llama(checkpoint: bool, layers: int | None = None) -> nn.Module:
        sizes = {"hidden_size": s.width, "intermediate_size": 43 * s.width // 16, "num_attention_heads": s.heads}
        sizes |= {"num_key_value_heads": s.heads // 2, "num_hidden_layers": layers or s.layers}
        return _Language("Llama", checkpoint=checkpoint, use_cache=False, **sizes)

    def conv(checkpoint: bool, layers: int | None = None) -> nn.Module:
        return _ConvNet(layers or net, s.channels, checkpoint=checkpoint)

    in_halves = f"T5, {layers // 2} + {layers // 2} x {s.width}, sequence {sequence}, batch {s.batch}"
    in_pixels = f"{net} x {s.channels} channels, {s.pixels} x {s.pixels}, batch {s.batch}"
    return {
        "gpt": Family(f"GPT, {deep} x {transformer}", gpt, next_tokens, s.batch),
        "bert": Family(f"BERT, {layers} x {transformer}", bert, tokens(s.sequence), s.batch),
        "t5": Family(in_halves, t5, tokens(sequence), s.batch),
        "llama": Family(f"Llama, {layers} x {transformer}", llama, tokens(s.sequence), s.batch),
        "conv": Family(f"a residual network, {in_pixels}", conv, images, s.batch, "images"),
    }


FAMILIES = families(SMALL)
BY_SIZE = {"small": FAMILIES, "large": families(LARGE)}
