"""Bytes stored between forward and backward, in memory or on a disk, by plain PyTorch and under a preset.

Plain PyTorch: every storage that autograd saves counts once and whole, weights and buffers apart. Under a preset,
everything goes through tier "nvme" without a minimum size and is written before backward begins, so that the bytes
counted are those the engine really stores: written ones (blocks of 4 KiB included) and those it kept, except for
tensors that it makes again from others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import compact

from .._processes.serve import Tell
from .._workload.tools import gradient_hash

if TYPE_CHECKING:
    from tba import OffloadStats

Forward = Callable[[], Tensor]
# In the first steps the engine still tries what it can leave out; the one after them is counted.
_SETTLING_STEPS = 2
PLAIN = "plain"


def unique_bytes(model: nn.Module, forward: Forward) -> int:
    """Count the bytes of all storages that autograd saves in one forward, except parameters and buffers."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    # Held until all are counted: a freed storage's address may be given to another.
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = forward()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    del out
    return sum(nbytes for address, nbytes in storages.items() if address not in weights)


def stored_bytes(
    model: nn.Module, forward: Forward, backward: Callable[[Tensor], None], settings: Mapping[str, Any]
) -> int:
    """Count the bytes that the engine stores between forward and backward of a step.

    Args:
        model: the model trained; the last of several backwards leaves its gradients.
        forward: makes the graph.
        backward: ends the step that `forward` began.
        settings: fields of `OffloadConfig`, such as `compress`; tier and smallest size are set here.
    """
    from tba import offload_context

    with closing(offload_context(model, tier="nvme", min_tensor_bytes=0, **settings)) as offload, offload:
        for _ in range(_SETTLING_STEPS):
            model.zero_grad(set_to_none=True)
            backward(forward())
        model.zero_grad(set_to_none=True)
        offload.flush()  # a write that backward overtook counts when it ends, which must not be after this
        before = offload.stats()
        out = forward()
        offload.flush()
        after = offload.stats()
        backward(out)
    return _held(after) - _held(before)


def _held(stats: OffloadStats) -> int:
    """Bytes written, and bytes kept except those of tensors made again from others, which take no room."""
    return stats.written_bytes + stats.kept_bytes - stats.derived_bytes


def measure_block(options: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Measure one Llama block of transformers in bf16: stored bytes under presets, and the error of its gradients.

    Options: `width`, `heads`, `batch`, `sequence`, `presets` (names), `threads`.

    Returns:
        `plain_bytes`, and per preset `stored_bytes`, `gradients_bit_equal`, and `relative_error` and `cosine` of the
        gradient of all weights as one vector.
    """
    torch.set_num_threads(options["threads"])
    model, hidden, positions, grad = _llama_block(**{n: options[n] for n in ("width", "heads", "batch", "sequence")})

    def forward() -> Tensor:
        out: Tensor = model(hidden, position_embeddings=positions)
        return out

    def backward(out: Tensor) -> None:
        hidden.grad = None
        out.backward(grad)

    plain = unique_bytes(model, forward)
    backward(forward())
    exact, wanted = _gradient(model), gradient_hash([*model.parameters(), hidden])
    presets = {}
    for name in options["presets"]:
        stored = stored_bytes(model, forward, backward, {} if name == PLAIN else {"compress": name})
        found = _gradient(model)
        presets[name] = {
            "stored_bytes": stored,
            "gradients_bit_equal": gradient_hash([*model.parameters(), hidden]) == wanted,
            "relative_error": compact.relative_error(found, exact),
            "cosine": compact.cosine(found, exact),
        }
        tell(name)
    return {"plain_bytes": plain, "presets": presets}


def _llama_block(width: int, heads: int, batch: int, sequence: int) -> tuple[nn.Module, Tensor, Any, Tensor]:
    """Make the block, its input [B, S, W], the rotary embedding's cosines and sines, and a gradient of its output."""
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
    return model, hidden, positions, torch.randn(batch, sequence, width).bfloat16()


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
