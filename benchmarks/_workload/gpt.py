"""A GPT over bytes, in plain PyTorch: the model of the benchmarks, the demo and the tests.

Nothing in it knows about offloading: the benchmarks measure what a user's own model would see.
Legend: B batch, S sequence, W width, H heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as recompute


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Size of the model: `layers` blocks of `width` features in `heads` heads, over at most `sequence` positions."""

    layers: int
    width: int
    heads: int
    sequence: int
    vocab: int = 256
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads; got width={self.width}, heads={self.heads}")

    @property
    def name(self) -> str:
        """The size as tables print it: `24x256`."""
        return f"{self.layers}x{self.width}"


class Attention(nn.Module):
    """Causal self-attention and its projection: [B, S, W] -> [B, S, W]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return _drop(self.projection(self._attend(x)), self)

    def _attend(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        split = (batch, sequence, self.heads, width // self.heads)
        query, key, value = (part.view(split).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        out = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return out.transpose(1, 2).reshape(batch, sequence, width)


class MLP(nn.Module):
    """Two linear layers with GELU between them: [B, S, W] -> [B, S, W]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return _drop(self.down(functional.gelu(self.up(x))), self)


class Block(nn.Module):
    """One pre-norm transformer block: [B, S, W] -> [B, S, W]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def _drop(x: Tensor, module: Attention | MLP) -> Tensor:
    return functional.dropout(x, module.dropout, module.training) if module.dropout else x


class GPT(nn.Module):
    """Token and position embedding, `layers` blocks, a final norm and an untied head.

    `checkpoint=True` (or the attribute, set at any time) recomputes each block in backward, by PyTorch's non-reentrant
    checkpointing: the arm that we compare offloading with.
    """

    def __init__(self, config: GPTConfig, *, checkpoint: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint = checkpoint
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.sequence, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.apply(_initialise)

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] int64 -> [B, S, W]: what the head reads."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = recompute(block, x, use_reentrant=False) if self.checkpoint and self.training else block(x)
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens [B, S] int64 -> logits [B, S, V]; with `targets` [B, S] the mean cross entropy, a scalar in nats."""
        logits: Tensor = self.head(self.hidden(tokens))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    # GPT-2's rule: narrow normals, so that the first loss is near log(V) and falls from the first step.
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
