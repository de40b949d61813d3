"""Whole models: small ones of many kinds, each to be compiled as a whole; each returns its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from support.zoo import FAMILIES

WIDTH, BATCH = 64, 16


class Net(nn.Module):
    """Linear layers with normalization, dropout and a residual path; returns the loss."""

    def __init__(self, layers: int = 3, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.dropout(functional.gelu(layer(self.norm(x))))
        return x.square().mean()


class Broken(Net):
    """The same with three graph breaks: four graphs."""

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.layers
        x = x + self.dropout(functional.gelu(one(self.norm(x))))
        torch._dynamo.graph_break()
        x = x + self.dropout(functional.gelu(two(self.norm(x)).exp()))
        torch._dynamo.graph_break()
        x = x + self.dropout(functional.gelu(three(self.norm(x)).sin()))
        torch._dynamo.graph_break()
        return functional.gelu(self.norm(x).exp()).square().mean()


class Fused(Net):
    """Three parts of one projection, which are views of one piece of memory, and attention over them."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(BATCH // 4, 4, WIDTH)
        for layer in self.layers:
            q, k, v = torch.cat([layer(heads), heads, layer(heads).sin()], -1).view(BATCH // 4, 4, 3, 4, 16).unbind(2)
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape_as(heads)
        return self.norm(heads).square().mean()


class Outputs(Net):
    """Returns what it saves too, and edits a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(BATCH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x).exp()
        self.seen.add_(hidden.detach())
        again = self.layers[1](hidden).exp()
        self.kept = hidden, hidden.t(), again
        return (self.layers[2](again).sin() * hidden).sum()


class Checkpointed(Net):
    """Its layers are recomputed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: functional.gelu(layer(self.norm(x))).exp(), x, use_reentrant=False)
        return x.square().mean()


class Tied(Net):
    """Embeds tokens, and compares with all of them by the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + functional.silu(layer(self.norm(x)))
        return functional.cross_entropy((x @ self.words.weight.t()).flatten(0, 1), tokens.flatten())


class Skips(nn.Module):
    """A U-net: what goes down is joined again on the way up; its norms keep running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(*sizes, 3, stride=2, padding=1) for sizes in ((3, 8), (8, 16)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(*sizes, 2, stride=2) for sizes in ((16, 8), (16, 3)))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        one = functional.relu(self.norms[0](self.down[0](x)))
        two = functional.relu(self.down[1](one))
        back = functional.relu(self.norms[1](self.up[0](two)))
        return functional.mse_loss(self.up[1](torch.cat([back, one], 1)), x)


class Fourier(Net):
    """Mixes rows by a Fourier transform instead of attention."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(x + torch.fft.fft2(x).real)
            x = x + self.dropout(functional.gelu(layer(x)))
        return x.square().mean()


class Adapted(Net):
    """Frozen layers with a trained low-rank path beside each (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in self.layers)
        self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = x + functional.gelu(layer(self.norm(x)) + up(self.dropout(down(x))))
        return x.square().mean()


class InPlace(Net):
    """Edits what it has made, and slices of it."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(self.norm(x))
            y[:, : WIDTH // 2] *= 2
            y = y.sin().add_(1)
            x = x + y.index_add(0, torch.arange(4), y[4:8].exp())
        return x.square().mean()


class Experts(Net):
    """Each row goes by the two of three layers that it weighs most."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            weights, chosen = self.gate(x).softmax(-1).topk(2)
            all_ = torch.stack([functional.gelu(layer(self.norm(x))) for layer in self.layers], 1)
            x = x + (all_.gather(1, chosen[..., None].expand(-1, -1, WIDTH)) * weights[..., None]).sum(1)
        return x.square().mean()


class Unrolled(Net):
    """One gated layer, eight times over."""

    def forward(self, x: Tensor) -> Tensor:
        reset, update, new = self.layers
        state = torch.zeros_like(x)
        for _ in range(8):
            keep = torch.sigmoid(update(x + state))
            state = keep * state + (1 - keep) * torch.tanh(new(x + torch.sigmoid(reset(state)) * state))
        return state.square().mean()


def tokens_batch() -> tuple[Tensor]:
    return (torch.randint(50, (4, 32)),)


def images_batch() -> tuple[Tensor]:
    return (torch.randn(4, 3, 16, 16),)


def batch(rows: int = BATCH) -> tuple[Tensor]:
    return (torch.randn(rows, WIDTH),)


def dynamic_batches() -> Callable[[], tuple[Tensor]]:
    sizes = iter([8, 12, 20, 32, 6])
    return lambda: batch(next(sizes))


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]] = {
    "net": (Net, batch, {}),
    "breaks": (Broken, batch, {}),
    "fused": (Fused, batch, {}),
    "outputs": (Outputs, batch, {}),
    "checkpointed": (Checkpointed, batch, {}),
    "autocast": (Net, batch, {"autocast": True}),
    "accumulated": (Net, batch, {"forwards": 2}),
    "dynamic": (Net, batch, {"steps": 5}),
    "tied": (Tied, tokens_batch, {}),
    "skips": (Skips, images_batch, {}),
    "fourier": (Fourier, batch, {}),
    "adapted": (Adapted, batch, {}),
    "in place": (InPlace, batch, {}),
    "experts": (Experts, batch, {}),
    "unrolled": (Unrolled, batch, {}),
    **{str(each): (each.make_model, each.make_batch, {}) for each in FAMILIES if each.name != "jagged"},
}
