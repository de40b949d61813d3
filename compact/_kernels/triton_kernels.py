"""Triton kernels of `grouped`: a tensor is read once, quantized in registers and written once; and back. CUDA only.

Equal to `grouped` to the last bit, with stochastic rounding and rotation, because each step is the same IEEE operation:
divisions are correctly rounded (`div_rn`), multiply and add are not fused (`enable_fp_fusion=False`), and rounding to
nearest is an addition that leaves no room for a fraction. Magnitudes are compared as integers, so that NaN, whose bit
pattern is above that of infinity, is not lost.

`Quantized` imports this when it gets a CUDA tensor; triton comes with torch's CUDA builds. Under Triton's interpreter
(`TRITON_INTERPRET=1`) the kernels also run on CPU tensors, for tests on machines without a device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from .grouped import TINY_BITS, Scheme
from .hadamard import weights
from .noise import PERIOD, UNIT, Noise

# Numbers per program: 16 for each of 128 threads.
_TILE = 2048
# Adding and subtracting this rounds a number below 2**22 to the nearest integer, halves to even.
_ROUND = 1.5 * 2.0**23


def supports(scheme: Scheme, dtype: torch.dtype) -> bool:
    """Whether these kernels apply: integers, groups of neighbors, a power of two that fits one program; any dtype."""
    group = scheme.group
    return scheme.levels.floating is None and scheme.columns == 1 and group & (group - 1) == 0 and group <= _TILE


def encode(values: Tensor, scheme: Scheme, noise: Noise | None, scales: Tensor, codes: Tensor) -> None:
    """Quantize as `grouped.encode` does."""
    groups, rows = scales.numel(), max(1, _TILE // scheme.group)
    levels = scheme.levels
    none = values  # placeholder for unused pointers
    with _device(values):
        _encode[(triton.cdiv(groups, rows),)](
            values,
            scales,
            codes,
            none if noise is None else noise.base,
            none if noise is None else noise.shift,
            _weights(scheme, values) if scheme.rotated else none,
            values.numel(),
            groups,
            TOP=levels.top,
            LOWEST=levels.lowest,
            HIGHEST=levels.highest,
            CENTERED=levels.centered,
            BITS=levels.bits,
            GROUP=scheme.group,
            ROWS=rows,
            NOISY=noise is not None,
            ROTATED=scheme.rotated,
            PERIOD=PERIOD,
            UNIT=UNIT,
            TINY_BITS=TINY_BITS,
            ROUND=_ROUND,
            enable_fp_fusion=False,
        )


def decode(codes: Tensor, scales: Tensor, scheme: Scheme, out: Tensor) -> None:
    """Decode as `grouped.decode` does."""
    groups, rows = scales.numel(), max(1, _TILE // scheme.group)
    levels = scheme.levels
    with _device(out):
        _decode[(triton.cdiv(groups, rows),)](
            codes,
            scales,
            out.view(torch.int16) if out.dtype is torch.bfloat16 else out,
            _weights(scheme, out) if scheme.rotated else out,
            out.numel(),
            groups,
            OFFSET=levels.lowest if levels.centered else levels.lowest + 0.5,
            BITS=levels.bits,
            GROUP=scheme.group,
            ROWS=rows,
            ROTATED=scheme.rotated,
            BF16=out.dtype is torch.bfloat16,
            enable_fp_fusion=False,
        )


def _weights(scheme: Scheme, like: Tensor) -> Tensor:
    return weights(scheme.group, like.device)


def _device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current: Triton launches on the current device, wherever its arguments are."""
    return nullcontext() if tensor.is_cpu else torch.get_device_module(tensor.device).device(tensor.device)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _butterflies(x, ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """H x per row of [ROWS, GROUP], in rounds of sums and differences in the order of `Rotation`."""
    for stage in tl.static_range(16):
        if (1 << stage) < GROUP:
            pairs = tl.reshape(x, (ROWS, GROUP // (2 << stage), 2, 1 << stage))
            upper, lower = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            both = tl.join(upper + lower, upper - lower)
            x = tl.reshape(tl.permute(both, (0, 1, 3, 2)), (ROWS, GROUP))
    return x


# Half of its lines are parameters: a Triton kernel gets each setting as one.
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _encode(  # type: ignore[no-untyped-def]
    values,
    scales,
    codes,
    base,
    shift,
    weights,
    count,
    groups,
    TOP: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    CENTERED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    NOISY: tl.constexpr,
    ROTATED: tl.constexpr,
    PERIOD: tl.constexpr,
    UNIT: tl.constexpr,
    TINY_BITS: tl.constexpr,
    ROUND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, GROUP)
    index = row[:, None] * GROUP + column[None, :]
    x = tl.load(values + index, mask=index < count, other=0.0).to(tl.float32)
    if ROTATED:
        x = _butterflies(x * tl.load(weights + column)[None, :], ROWS, GROUP)
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    largest = tl.maximum(bits, TINY_BITS).to(tl.float32, bitcast=True)
    top = tl.full((ROWS,), TOP, tl.float32)
    tl.store(scales + row, tl.div_rn(largest, top), mask=row < groups)
    y = x * tl.div_rn(top, largest)[:, None]
    if NOISY:
        inside = (row < groups)[:, None] & (column < GROUP)[None, :]
        dither = tl.load(base + index % PERIOD) ^ tl.load(shift + index // PERIOD, mask=inside, other=0)
        y = y + dither.to(tl.float32) * UNIT
    if CENTERED:
        code = ((y + ROUND) - ROUND).to(tl.int32)
    else:  # floor; `tl.floor` takes denormal numbers for zero
        code = y.to(tl.int32)
        code -= (code.to(tl.float32) > y).to(tl.int32)
    if NOISY:
        code = tl.minimum(tl.maximum(code, LOWEST), HIGHEST)
    PER: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = GROUP // PER
    if BITS < 8:
        lanes = tl.reshape(code - LOWEST, (ROWS, BYTES, PER))
        code = tl.sum(lanes << (tl.arange(0, PER) * BITS)[None, None, :], axis=2)
    place = row[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    tl.store(codes + place, (code & 0xFF).to(tl.uint8), mask=(row < groups)[:, None])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _decode(  # type: ignore[no-untyped-def]
    codes,
    scales,
    out,
    weights,
    count,
    groups,
    OFFSET: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ROTATED: tl.constexpr,
    BF16: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, GROUP)
    PER: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = GROUP // PER
    place = row[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    inside = (row < groups)[:, None]
    if BITS == 8:
        x = tl.load(codes + place, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        packed = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
        lanes = (packed[:, :, None] >> (tl.arange(0, PER) * BITS)[None, None, :]) & ((1 << BITS) - 1)
        x = tl.reshape(lanes, (ROWS, GROUP)).to(tl.float32) + OFFSET
    x = x * tl.load(scales + row, mask=row < groups, other=0.0)[:, None]
    if ROTATED:
        x = _butterflies(x, ROWS, GROUP) * tl.load(weights + column)[None, :]
    index = row[:, None] * GROUP + column[None, :]
    if BF16:  # to nearest, halves to even, by hand: Triton's interpreter truncates
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(out + index, bits.to(tl.int16), mask=index < count)
    else:
        tl.store(out + index, x.to(out.dtype.element_ty), mask=index < count)
