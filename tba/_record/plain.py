"""Plain tensors: strided, over a storage of their own kind, in host or CUDA memory. All others are kept, by reason."""

from __future__ import annotations

from torch import Tensor, strided


def why_not_plain(tensor: Tensor) -> str:
    """What a tensor is instead of a plain one, as statistics name it: its class, its layout, its device."""
    if type(tensor) is not Tensor:
        return type(tensor).__name__
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    if tensor.layout is not strided:
        return str(tensor.layout)
    return "no storage" if tensor.is_cpu or tensor.is_cuda else tensor.device.type


def shown_bytes(tensor: Tensor) -> int:
    """Bytes of the elements that a tensor shows; 0 where it has no count of them."""
    try:
        return tensor.numel() * tensor.itemsize
    except RuntimeError:  # an opaque tensor may have none
        return 0
