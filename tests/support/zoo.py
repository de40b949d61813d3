"""The models of the exactness tests: one tiny member of each family, with random weights and random batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from support.gpt import GPT, GPTConfig
from support.models import llama, transformer

BATCH, SEQUENCE, WIDTH, VOCAB = 2, 16, 32, 61


@dataclass(frozen=True)
class Family:
    """A model and how to feed it.

    Attributes:
        make_model: with dropout where the family has it, so that the random state is tested too.
        make_batch: keywords or arguments of the model, from the default generator.
        blocks: the names of the modules that a checkpointed run recomputes.
        unread_bytes: saved by each forward where no gradient flows.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Any]
    blocks: tuple[str, ...]
    unread_bytes: int = 0

    def __str__(self) -> str:
        return self.name


class ConvNet(nn.Module):
    """Two residual blocks of convolution and batch norm, [B, 3, 8, 8] -> loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.one, self.two = ConvBlock(16), ConvBlock(16)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = functional.max_pool2d(self.two(self.one(self.stem(images))), 2)
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class ConvBlock(nn.Module):
    """Convolution, batch norm, in-place ReLU, twice, and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.body(x), inplace=True)


class Recurrent(nn.Module):
    """Embedding, projection, two LSTM layers, head: a language model, [B, S] -> loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.layers = LSTMLayers()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(self.layers(self.projection(self.embedding(tokens))))
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


class LSTMLayers(nn.Module):
    """The sequence of hidden states of a two-layer LSTM with dropout: [B, S, W] -> [B, S, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


class JaggedModel(nn.Module):
    """Embedding, two transformer layers, head: a language model of sequences of several lengths, without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.one, self.two = JaggedLayer(), JaggedLayer()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(self.two(self.one(self.embedding(tokens))))
        return functional.cross_entropy(scores.values(), targets.values())


class JaggedLayer(nn.Module):
    """Attention and an MLP with dropout, both behind a norm, on a jagged nested tensor: [B, lengths, W] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_too = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        heads = [each(normed).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)]
        x = x + self.drop(self.out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2)))
        return x + self.down(functional.gelu(self.up(self.norm_too(x))))


def jagged() -> Tensor:
    """Tokens of three sequences of as many lengths."""
    rows = [torch.randint(0, VOCAB, (length,)) for length in (SEQUENCE, 3, 9)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def _jagged_pair() -> tuple[Tensor, Tensor]:
    return jagged(), jagged()


def _tokens() -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, SEQUENCE))


def _pair() -> tuple[Tensor, Tensor]:
    return _tokens(), _tokens()


def _labelled() -> dict[str, Tensor]:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def _masked() -> dict[str, Tensor]:
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    mask[1, SEQUENCE // 2 :] = 0
    return {"input_ids": _tokens(), "attention_mask": mask, "labels": _tokens()}


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))


def _gpt() -> nn.Module:
    return GPT(GPTConfig(layers=2, width=WIDTH, heads=2, sequence=SEQUENCE, vocab=VOCAB, dropout=0.1))


_SIZES: dict[str, Any] = {"width": WIDTH, "layers": 2, "heads": 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_jitter_noise": 0.1}
_GPT2 = partial(transformer, "GPT2LMHeadModel", **_SIZES, positions=SEQUENCE)
_BERT = partial(transformer, "BertForMaskedLM", **_SIZES, inner=2 * WIDTH, positions=SEQUENCE)
_T5 = partial(transformer, "T5ForConditionalGeneration", **_SIZES, inner=2 * WIDTH, d_kv=16)
_MIXTRAL = partial(llama, "MixtralForCausalLM", **_EXPERTS)

FAMILIES = (
    Family("gpt", _gpt, _pair, ("blocks.0", "blocks.1")),
    Family("gpt2", _GPT2, _labelled, ("transformer.h.0", "transformer.h.1")),
    Family("bert", _BERT, _masked, ("bert.encoder.layer.0", "bert.encoder.layer.1")),
    Family("t5", _T5, _labelled, ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")),
    Family("llama", llama, _labelled, ("model.layers.0", "model.layers.1")),
    # The balancing loss takes only the indices of a top-k, whose node saves them: int64 [B * S, 2] for each layer.
    Family("mixtral", _MIXTRAL, _labelled, ("model.layers.0", "model.layers.1"), 2 * BATCH * SEQUENCE * 2 * 8),
    Family("convnet", ConvNet, _images, ("one", "two")),
    Family("lstm", Recurrent, _pair, ("layers",)),
    Family("jagged", JaggedModel, _jagged_pair, ("one", "two")),
)


class LowRank(nn.Module):
    """A frozen layer plus a trained low-rank path beside it (LoRA): `layer(x) + b(a(x))`."""

    def __init__(self, layer: nn.Module, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.layer, self.a, self.b = layer, a, b

    @property
    def weight(self) -> Tensor:
        """Models look at the dtype of a layer's weight."""
        weight: Tensor = self.layer.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.b(self.a(x))
        return out


def add_low_rank(model: nn.Module, rank: int = 4) -> nn.Module:
    """Freeze `model` and put a low-rank path beside each linear layer (GPT-2's Conv1D too) and convolution."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                a, b = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)
            elif isinstance(layer, transformers.pytorch_utils.Conv1D):
                a, b = nn.Linear(layer.nx, rank, bias=False), nn.Linear(rank, layer.nf, bias=False)
            elif isinstance(layer, nn.Conv2d):
                a = nn.Conv2d(layer.in_channels, rank, layer.kernel_size, padding=layer.padding, bias=False)
                b = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
            else:
                continue
            setattr(parent, name, LowRank(layer, a, b))
    return model
