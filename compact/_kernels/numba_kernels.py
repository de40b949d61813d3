"""Numba kernels of `grouped`: each group is read once, quantized in registers and written once; and back. CPU only.

Equal to `grouped` to the last bit, with stochastic rounding and rotation, because each step is the same IEEE operation
with one rounding: without `fastmath` nothing is fused or reordered. Magnitudes are compared as integers, so that NaN,
whose bit pattern is above that of infinity, is not lost.

`Quantized` imports this when it gets a CPU tensor and numba is installed. The kernels are then compiled for fp32 and
for bf16, in a few seconds, and cached on disk for the next process if possible. They run in one thread without the GIL,
two to three times as fast as one thread of `grouped`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba as nb  # type: ignore[import-not-found, import-untyped, unused-ignore]  # an extra, and without types
import numpy as np
import torch
from torch import Tensor

from .grouped import TINY_BITS, Scheme
from .hadamard import weights
from .noise import PERIOD, UNIT, Noise

_UNIT = np.float32(UNIT)
_NO_NOISE, _NO_WEIGHTS = np.zeros(0, np.int16), np.zeros(0, np.float32)  # for unused arguments


def _jit(function: Callable[..., None]) -> Any:
    """Compile a function at its first call; uncached if numba finds no directory for the machine code."""
    try:
        return nb.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:
        return nb.njit(nogil=True, error_model="numpy")(function)


def supports(scheme: Scheme, dtype: torch.dtype) -> bool:
    """Whether these kernels apply: integers, groups of neighbors whose noise comes from one block, fp32 and bf16."""
    return (
        scheme.levels.floating is None
        and scheme.columns == 1
        and PERIOD % scheme.group == 0
        and dtype in (torch.float32, torch.bfloat16)
    )


def encode(values: Tensor, scheme: Scheme, noise: Noise | None, scales: Tensor, codes: Tensor) -> None:
    """Quantize as `grouped.encode` does."""
    levels = scheme.levels
    base, shift = (_NO_NOISE, _NO_NOISE) if noise is None else (noise.base.numpy(), noise.shift.numpy())
    numbers = levels.bits, levels.centered, np.float32(levels.top), levels.lowest, levels.highest
    _encode(_array(values), scales.numpy(), codes.numpy(), base, shift, _weights(scheme), scheme.group, *numbers)


def decode(codes: Tensor, scales: Tensor, scheme: Scheme, out: Tensor) -> None:
    """Decode as `grouped.decode` does."""
    levels = scheme.levels
    offset = np.float32(levels.lowest if levels.centered else levels.lowest + 0.5)
    _decode(codes.numpy(), scales.numpy(), _array(out), _weights(scheme), scheme.group, levels.bits, offset)


def _array(tensor: Tensor) -> Any:
    """View the memory as a NumPy array; bf16, which NumPy lacks, as uint16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def _weights(scheme: Scheme) -> Any:
    return weights(scheme.group, torch.device("cpu")).numpy() if scheme.rotated else _NO_WEIGHTS


@_jit
def _butterflies(x: Any, y: Any) -> None:
    """x = H x in rounds of sums and differences, in the order of `Rotation`. log2 of x's length is even; y is scratch.

    Each round pairs neighbors and puts sums into the lower half, differences into the upper (Pease 1968). So the rounds
    are alike, their additions are those of `Rotation`, and after the last round each number is in its place.
    """
    half = x.size // 2
    rounds = half
    while rounds:
        for i in range(half):
            y[i] = x[2 * i] + x[2 * i + 1]
            y[half + i] = x[2 * i] - x[2 * i + 1]
        for i in range(half):
            x[i] = y[2 * i] + y[2 * i + 1]
            x[half + i] = y[2 * i] - y[2 * i + 1]
        rounds //= 4


# One function, though long: with the first loops in a helper, numba encoded bf16 to int8 at a third of the speed.
@_jit
def _encode(
    values: Any,
    scales: Any,
    codes: Any,
    base: Any,
    shift: Any,
    weight: Any,
    group: int,
    bits: int,
    centered: bool,
    top: Any,
    lowest: int,
    highest: int,
) -> None:
    halves, noisy, rotated = values.itemsize == 2, base.size > 0, weight.size > 0
    length = group * bits // 8
    x, y = np.zeros(group, np.float32), np.zeros(group, np.float32)
    pattern, wide = x.view(np.int32), x.view(np.uint32)
    code = np.zeros(group, np.int32)
    for row in range(scales.size):
        start = row * group
        source = values[start : start + group]
        if halves:
            for i in range(source.size):
                wide[i] = np.uint32(source[i]) << np.uint32(16)
        else:
            for i in range(source.size):
                x[i] = source[i]
        for i in range(source.size, group):
            x[i] = 0
        if rotated:
            for i in range(group):
                x[i] *= weight[i]
            _butterflies(x, y)
        magnitude = np.int32(TINY_BITS)
        for i in range(group):
            magnitude = max(magnitude, pattern[i] & np.int32(0x7FFFFFFF))
        largest = np.int32(magnitude).view(np.float32)
        scales[row] = largest / top
        inverse = top / largest
        place = codes[row * length : row * length + length]
        if bits == 8 and not noisy:  # equal to the code below, in one loop: a third faster
            for i in range(group):
                place[i] = np.uint8(np.int32(np.rint(x[i] * inverse)))
            continue
        for i in range(group):
            x[i] *= inverse
        if noisy:
            dither, moved = base[start % PERIOD :], shift[start // PERIOD]
            for i in range(group):
                x[i] += np.float32(dither[i] ^ moved) * _UNIT
        if centered:
            for i in range(group):
                code[i] = np.int32(np.rint(x[i]))
        else:
            for i in range(group):
                code[i] = np.int32(np.floor(x[i]))
        if noisy:  # top * largest / largest may round up to above top
            for i in range(group):
                code[i] = min(max(code[i], lowest), highest)
        if bits == 8:
            for i in range(length):
                place[i] = np.uint8(code[i])
        elif bits == 4:
            for i in range(length):
                place[i] = np.uint8((code[2 * i] - lowest) | (code[2 * i + 1] - lowest) << 4)
        else:
            for i in range(length):
                low = (code[4 * i] - lowest) | (code[4 * i + 1] - lowest) << 2
                place[i] = np.uint8(low | (code[4 * i + 2] - lowest) << 4 | (code[4 * i + 3] - lowest) << 6)


@_jit
def _decode(codes: Any, scales: Any, out: Any, weight: Any, group: int, bits: int, offset: Any) -> None:
    halves, rotated = out.itemsize == 2, weight.size > 0
    length = group * bits // 8
    x, y = np.zeros(group, np.float32), np.zeros(group, np.float32)
    pattern = x.view(np.uint32)
    for row in range(scales.size):
        start, scale = row * group, scales[row]
        place = codes[row * length : row * length + length]
        if bits == 8:
            for i in range(length):
                x[i] = np.float32(np.int8(place[i]))
        elif bits == 4:
            for i in range(length):
                x[2 * i] = np.float32(place[i] & 15) + offset
                x[2 * i + 1] = np.float32(place[i] >> 4) + offset
        else:
            for i in range(length):
                x[4 * i] = np.float32(place[i] & 3) + offset
                x[4 * i + 1] = np.float32((place[i] >> 2) & 3) + offset
                x[4 * i + 2] = np.float32((place[i] >> 4) & 3) + offset
                x[4 * i + 3] = np.float32(place[i] >> 6) + offset
        for i in range(group):
            x[i] *= scale
        if rotated:
            _butterflies(x, y)
            for i in range(group):
                x[i] *= weight[i]
        target = out[start : start + group]
        if halves:  # to nearest, halves to even
            for i in range(target.size):
                odd = (pattern[i] >> np.uint32(16)) & np.uint32(1)
                target[i] = np.uint16((pattern[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        else:
            for i in range(target.size):
                target[i] = x[i]
