"""Plain: tensors that can be moved (strided, with a storage, in host or CUDA memory), and why another one cannot."""

from __future__ import annotations

from torch import Tensor, strided


def why_not_plain(tensor: Tensor) -> str:
    """Name what keeps a tensor from being plain, for statistics: its class, its layout or its device."""
    if type(tensor) is not Tensor:
        return type(tensor).__name__
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    if tensor.layout is not strided:
        return str(tensor.layout)
    return "no storage" if tensor.is_cpu or tensor.is_cuda else tensor.device.type


def shown_bytes(tensor: Tensor) -> int:
    """Count the bytes of a tensor's elements; 0 for an opaque tensor that does not tell."""
    try:
        return tensor.numel() * tensor.itemsize
    except RuntimeError:  # opaque
        return 0
