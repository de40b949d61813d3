"""Product: a matrix product in its inputs' dtype, outside autocast."""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for two matrices of one dtype, contiguous, not differentiable.

    A CPU without 16-bit instructions multiplies bf16 matrices a hundred times slower than fp32 ones (measured: 3 s
    against 30 ms), so 16-bit matrices on a CPU go through fp32.
    """
    wide = torch.float32 if a.device.type == "cpu" and a.dtype.itemsize == 2 else a.dtype
    # Autocast leaves the variants with `out` alone.
    out = torch.empty(len(a), b.shape[1], dtype=wide, device=a.device)
    return torch.mm(a.detach().to(wide), b.detach().to(wide), out=out).to(a.dtype)
