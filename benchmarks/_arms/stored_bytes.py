"""The block arm: what presets store of one Llama block between forward and backward, and what they do to its gradients.

`tba.audit` counts and compares. Plain PyTorch keeps every storage that autograd saves, without weights; a preset keeps
what its codecs make, and nothing of tensors that it recomputes from others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._processes.serve import Tell


def measure_block(options: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Measure one Llama block of transformers in bf16: stored bytes under presets, and the error of its gradients.

    Options: `width`, `heads`, `batch`, `sequence`, `presets` (names), `threads`.

    Returns:
        `plain_bytes`, and for each preset `stored_bytes`, and `relative_error` and `cosine` of the gradient of all
        weights as one vector; `gradients_bit_equal` if there is no error.
    """
    from tba import audit

    torch.set_num_threads(options["threads"])
    model, batch, grad = _llama_block(**{name: options[name] for name in ("width", "heads", "batch", "sequence")})
    presets: dict[str, Any] = {}
    plain_bytes = 0
    for name in options["presets"]:
        found = audit(model, batch, loss=lambda out: (out * grad).sum(), presets=[name])
        plain_bytes, outcome = sum(found.before_bytes.values()), found.outcomes[name]
        presets[name] = {
            "stored_bytes": sum(outcome.after_bytes.values()),
            "gradients_bit_equal": outcome.relative_error == 0.0,
            "relative_error": outcome.relative_error,
            "cosine": outcome.cosine,
        }
        tell(name)
    return {"plain_bytes": plain_bytes, "presets": presets}


def _llama_block(width: int, heads: int, batch: int, sequence: int) -> tuple[nn.Module, dict[str, Any], Tensor]:
    """Make the block, its arguments (input [B, S, W]; cosines and sines), and the gradient of its output."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    # Llama's own shape: the feed-forward is 8/3 as wide, as a multiple of 64.
    inner = -(-width * 8 // 3 // 64) * 64
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=heads
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = LlamaDecoderLayer(config, 0).bfloat16()
    hidden = torch.randn(batch, sequence, width).bfloat16().requires_grad_()
    positions = LlamaRotaryEmbedding(config)(hidden.detach(), torch.arange(sequence)[None])
    grad = torch.randn(batch, sequence, width).bfloat16()
    return model, {"hidden_states": hidden, "position_embeddings": positions}, grad
