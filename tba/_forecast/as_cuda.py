"""As on CUDA: makes operators on fake CPU tensors save what CUDA's operators would.

On a CPU, dropout saves its mask as numbers, and attention with dropout saves its probabilities; on CUDA, the mask is
bytes, and attention is fused with or without dropout. A build of PyTorch without CUDA does not dispatch to CUDA's
operators, so calls of those two functions are redirected to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_HALF = (torch.float16, torch.bfloat16)
_FLASH_WIDTH = 256  # of a head, at most
_FUSES_THREE = torch.__version__ >= "2.14"  # dimensions: these versions add a batch dimension
_DROPOUTS = (functional.dropout, torch.dropout)
_aten = torch.ops.aten


class AsCuda(TorchFunctionMode):
    """Redirects calls of dropout and of scaled dot product attention."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **given)
        if func in _DROPOUTS:
            return _dropout(func, *args, **given)
        return func(*args, **given)


def _dropout(func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    p, training, inplace = (
        args[place] if place < len(args) else kwargs.get(name, default)
        for place, (name, default) in enumerate((("p", 0.5), ("training", True), ("inplace", False)))
    )
    if "train" in kwargs:  # as torch.dropout calls it
        training = kwargs["train"]
    if not training or not 0 < p < 1 or inplace:
        return func(input, *args, **kwargs)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend with the flash kernel (half precision, no mask, one head width), else with the memory-efficient one.

    Both take four dimensions. From 2.14 on, torch adds one to three; otherwise it uses single products, as on a CPU.
    """
    if _FUSES_THREE and query.dim() == key.dim() == value.dim() == 3:
        query, key, value = (each.unsqueeze(0) for each in (query, key, value))
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa).squeeze(0)
    if query.dim() != 4:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    width = query.shape[-1]
    if attn_mask is None and query.dtype in _HALF and width <= _FLASH_WIDTH and value.shape[-1] == width:
        out: Tensor = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    bias = None
    if attn_mask is not None:
        bias = attn_mask
        if bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), -torch.inf)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    wants_gradient = torch.is_grad_enabled()
    out = _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, wants_gradient, dropout_p, is_causal, scale=scale
    )[0]
    return out
