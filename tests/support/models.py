"""Toy models: those that several tests train, a module that is made of a function, and Functions of a program's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Forward = Callable[..., Any]


class Made(nn.Module):
    """A module of these parts (modules, parameters, or tensors as buffers): `forward` is given it and the arguments."""

    def __init__(self, forward: Forward, **parts: nn.Module | Tensor | None) -> None:
        super().__init__()
        self._made_forward = forward
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._made_forward(self, *args, **kwargs)


class Around(nn.Module):
    """Another model, which has this one inside and adds to what it gives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Two linear layers beside a residual path."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.other(self.one(x).sigmoid()).tanh()


class RMSNorm(nn.Module):
    """A norm that is written in Python, which lossy presets know by its class."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


# What models of transformers call their sizes: those of Bert, Llama and Mixtral, GPT-2's, T5's.
_USUAL = {
    "width": "hidden_size",
    "inner": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "positions": "max_position_embeddings",
}
_GPT2 = {"width": "n_embd", "inner": "n_inner", "layers": "n_layer", "heads": "n_head", "positions": "n_positions"}
_T5 = {"width": "d_model", "inner": "d_ff", "layers": "num_layers", "heads": "num_heads"}


def transformer(head: str, *, vocab: int = 61, **sizes: Any) -> Any:
    """A model of transformers from the default generator: by `width`, `inner` and so on, and by fields of its own."""
    import transformers

    cls = getattr(transformers, head)
    names = _GPT2 if head.startswith("GPT2") else _T5 if head.startswith("T5") else _USUAL
    fields = {names.get(name, name): value for name, value in sizes.items()}
    tokens = {"decoder_start_token_id": 0} if names is _T5 else {"bos_token_id": 1, "eos_token_id": 2}
    return cls(cls.config_class(vocab_size=vocab, use_cache=False, **tokens, **fields))


def llama(head: str = "LlamaForCausalLM", **changes: Any) -> Any:
    """A small Llama, or one of its kind."""
    sizes = {"width": 32, "inner": 64, "layers": 2, "heads": 4, "num_key_value_heads": 2, "positions": 64}
    return transformer(head, **(sizes | changes))


class LlamaLayer(nn.Module):
    """One decoder layer of Llama with its rotary embedding: [B, S, W] -> [B, S, W]."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        model = llama(layers=1, **changes).model
        self.layer, self.rotary = model.layers[0], model.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).unsqueeze(0)
        out: Tensor = self.layer(x, position_embeddings=self.rotary(x, places), position_ids=places)
        return out


# -- Functions of a program's own --------------------------------------------------------------------------------------


class Looks(torch.autograd.Function):
    """Passes its first argument on and saves the last ones; backward calls `look(gradient, *saved)` on its way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[..., object], *saved: Tensor) -> Tensor:
        ctx.look = look
        ctx.count = len(saved)
        ctx.save_for_backward(*saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.look(gradients[0], *ctx.saved_tensors)
        return (gradients[0], None, *([None] * ctx.count))


class CubedTwice(torch.autograd.Function):
    """x^3, whose backward reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach() ** 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (a,), (b,) = ctx.saved_tensors, ctx.saved_tensors
        assert torch.equal(a, b)
        return 3 * a * b * gradients[0]


class Mixed(nn.Module):
    """Saves token ids, a boolean mask, an fp32 upcast of bf16 and plain floats."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.norm = nn.LayerNorm(64)
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x.masked_fill(ids[..., None] % 7 == 0, 0.5)
        x = self.norm(x.to(torch.bfloat16).float().square() + x)
        hidden = functional.silu(self.gate(x)) * self.up(x)
        return functional.cross_entropy(self.down(hidden).flatten(0, 1), ids.flatten())


class Waves(nn.Module):
    """One module, in which nothing can recompute: what memory has no room for has to move."""

    def __init__(self, layers: int, nbytes: int) -> None:
        super().__init__()
        self.layers = layers
        self.scale = nn.Parameter(torch.full((nbytes // 4,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.layers):
            x = torch.tanh(x * self.scale)
        return x.square().mean()
