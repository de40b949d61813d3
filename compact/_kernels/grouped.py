"""Groups: numbers to few-bit codes with one fp32 scale per group, and back, in blocks that stay in the cache.

Shapes: a block is [k, g, c], one contiguous range of the flat tensor: k units, g numbers per group, c columns side by
side (1 for groups of neighbors). Its scales are [k, 1, c].

    largest = max over g of |x|, at least TINY          scale = largest / top
    code    = round(x * (top / largest) + noise)        decoded = code * scale

Every step is one IEEE fp32 operation with one rounding, in this order, so device, thread count and block size change no
bit. `triton_kernels` and `numba_kernels` compute the same bits in one pass.

A chain of torch operations over a whole tensor would read and write main memory once per operation. Here each block
passes through all operations while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .bits import pack, unpack
from .hadamard import Rotation
from .noise import UNIT, Noise

# Values per block: 512 KiB of fp32, in the L2 and L3 caches. Half as many take 15% longer (for the calls), a quarter
# 33%. On an accelerator large blocks only limit scratch memory.
CPU_BLOCK = 1 << 17
DEVICE_BLOCK = 1 << 24
# Smallest magnitude to scale a group by: 1 / TINY is finite, and so is its product with any code. The numbers of a
# smaller group are off by at most TINY / top.
TINY = 2.0**-100
TINY_BITS = int(torch.tensor(TINY, dtype=torch.float32).view(torch.int32))  # kernels compare magnitudes as integers


class Levels(NamedTuple):
    """The values of a code, in units of the scale.

    Attributes:
        bits: per code.
        top: the largest value; the smallest is its negative.
        centered: True: integers, including 0. False: odd halves (-1.5, -0.5, 0.5, 1.5), which use every code, while a
            symmetric range around 0 would waste one of few.
        floating: the fp8 dtype with these values; None for integers and halves.
    """

    bits: int
    top: float
    centered: bool = True
    floating: torch.dtype | None = None

    @property
    def lowest(self) -> int:
        """Smallest code as a signed integer."""
        return -int(self.top) if self.centered else -int(self.top + 0.5)

    @property
    def highest(self) -> int:
        """Largest code as a signed integer."""
        return int(self.top) if self.centered else int(self.top - 0.5)


INT8 = Levels(8, 127.0)
INT4 = Levels(4, 7.0)
INT2 = Levels(2, 1.5, centered=False)
E4M3 = Levels(8, 448.0, floating=torch.float8_e4m3fn)
E5M2 = Levels(8, 57344.0, floating=torch.float8_e5m2)


class Scheme(NamedTuple):
    """How to quantize a flat tensor: levels, numbers per group, columns side by side, whether to rotate."""

    levels: Levels
    group: int
    columns: int = 1
    rotated: bool = False

    @property
    def unit(self) -> int:
        """Numbers per unit: one group of every column."""
        return self.group * self.columns

    def groups(self, count: int) -> int:
        """Number of scales for `count` numbers; a short last group counts as one."""
        return -(-count // self.unit) * self.columns

    def code_bytes(self, count: int) -> int:
        """Bytes of codes for `count` numbers; a short last group is padded."""
        return self.groups(count) * self.group * self.levels.bits // 8


class _Scratch:
    """Memory for one block and views of it, made once: making a view costs as much as adding a thousand numbers."""

    def __init__(self, scheme: Scheme, units: int, device: torch.device) -> None:
        shape = (units, scheme.group, scheme.columns)
        self.work, self.result = torch.empty(2, *shape, dtype=torch.float32, device=device).unbind(0)
        self.flat_work, self.flat_result = self.work.view(-1), self.result.view(-1)
        self.inverse = torch.empty(units, 1, scheme.columns, dtype=torch.float32, device=device)
        self.codes = torch.empty(shape if scheme.levels.bits < 8 else 0, dtype=torch.int8, device=device)
        self.code_bytes = self.codes.view(-1).view(torch.uint8)
        self.rotation = Rotation(scheme.group, units, device) if scheme.rotated else None
        # `torch.full` fills on the device; `torch.tensor` would wait for a copy from the host.
        self.top, self.smallest = (
            torch.full((), value, dtype=torch.float32, device=device) for value in (scheme.levels.top, TINY)
        )


def _blocks(
    values: Tensor, scales: Tensor, codes: Tensor, scheme: Scheme
) -> Iterator[tuple[Tensor, Tensor, Tensor, _Scratch]]:
    """Yield values [k, g, c], scales [k, 1, c], codes (flat, or [k, g, c] for 8 bits) and scratch of each block."""
    block = CPU_BLOCK if values.device.type == "cpu" else DEVICE_BLOCK
    units, shape = max(1, min(block, values.numel()) // scheme.unit), (-1, scheme.group, scheme.columns)
    if scheme.levels.bits == 8:
        coded = codes.view(scheme.levels.floating or torch.int8).view(shape).split(units)
    else:
        coded = codes.split(units * scheme.unit * scheme.levels.bits // 8)
    scaled = scales.view(-1, 1, scheme.columns).split(units)
    scratch = None
    for value, scale, code in zip(values.view(shape).split(units), scaled, coded, strict=True):
        if scratch is None or len(value) < len(scratch.work):  # the last block may be smaller
            scratch = _Scratch(scheme, len(value), values.device)
        yield value, scale, code, scratch


def encode(values: Tensor, scheme: Scheme, noise: Noise | None, scales: Tensor, codes: Tensor, start: int = 0) -> None:
    """Quantize.

    Args:
        values: float [n]; n a multiple of `scheme.unit` unless `columns` is 1.
        scheme: how.
        noise: for stochastic rounding; None rounds to nearest, halves to even (odd halves: up).
        scales: fp32 [scheme.groups(n)], written.
        codes: uint8 [scheme.code_bytes(n)], written.
        start: index of the first value's noise.
    """
    whole, groups, nbytes = _whole(values, scheme)
    if whole < values.numel():  # a short last group, padded with zeros
        last = values.new_zeros(scheme.group)
        last[: values.numel() - whole].copy_(values[whole:])
        encode(last, scheme, noise, scales[groups:], codes[nbytes:], start + whole)
    if whole:
        for value, scale, code, scratch in _blocks(values[:whole], scales[:groups], codes[:nbytes], scheme):
            _encode_block(value, scale, code, scheme, scratch, noise, start)
            start += value.numel()
        scales[:groups].div_(scratch.top)  # from largest magnitudes to scales, at once for all blocks


def _whole(values: Tensor, scheme: Scheme) -> tuple[int, int, int]:
    """Count the values in whole units, their groups, and the bytes of their codes."""
    whole = values.numel() // scheme.unit * scheme.unit
    return whole, whole // scheme.group, whole * scheme.levels.bits // 8


def _encode_block(
    values: Tensor, largest: Tensor, codes: Tensor, scheme: Scheme, scratch: _Scratch, noise: Noise | None, start: int
) -> None:
    levels, result = scheme.levels, scratch.result
    if scratch.rotation is not None:
        work = scratch.work
        work.copy_(values)
        rows = work.view(-1, scheme.group)
        scratch.rotation.forward(rows, rows)
    elif values.dtype is torch.float32:
        work = values
    else:
        work = scratch.work
        work.copy_(values)
    torch.abs(work, out=result)
    torch.amax(result, 1, keepdim=True, out=largest)
    torch.maximum(largest, scratch.smallest, out=largest)
    torch.div(scratch.top, largest, out=scratch.inverse)
    torch.mul(work, scratch.inverse, out=result)
    if levels.floating is not None:
        codes.copy_(result)
        return
    if noise is not None:
        noise.fill(scratch.flat_work, start)  # `work` is no longer needed
        scratch.flat_result.add_(scratch.flat_work, alpha=UNIT)  # exact, fused or not, as UNIT is a power of two
    if levels.centered:
        result.round_()
    else:
        result.floor_()
    if noise is not None:
        result.clamp_(levels.lowest, levels.highest)  # top * largest / largest may round up to above top
    if levels.bits == 8:
        codes.copy_(result)
        return
    scratch.codes.copy_(result.sub_(levels.lowest))
    pack(scratch.code_bytes, levels.bits, codes)


def decode(codes: Tensor, scales: Tensor, scheme: Scheme, out: Tensor) -> None:
    """The inverse of `encode`, into `out` [n] of any float dtype."""
    whole, groups, nbytes = _whole(out, scheme)
    if whole:
        for value, scale, code, scratch in _blocks(out[:whole], scales[:groups], codes[:nbytes], scheme):
            _decode_block(code, scale, scheme, scratch, value)
    if whole < out.numel():
        last = out.new_empty(scheme.group)
        decode(codes[nbytes:], scales[groups:], scheme, last)
        out[whole:].copy_(last[: out.numel() - whole])


def _decode_block(codes: Tensor, scales: Tensor, scheme: Scheme, scratch: _Scratch, out: Tensor) -> None:
    levels = scheme.levels
    direct = out.dtype is torch.float32 and scratch.rotation is None
    work = out if direct else scratch.work
    if levels.floating is not None:
        # Through fp16 by shifting bits: torch's cast from fp8 is ten times slower.
        halves = codes.view(torch.int8).to(torch.int16)
        if levels.floating is torch.float8_e4m3fn:
            halves = (halves << 7) & ~0x4000  # clears the sign's copy in fp16's extra exponent bit; 2**8 is missing
            scales = scales * 256.0
        else:
            halves = halves << 8
        work.copy_(halves.view(torch.float16))
    elif levels.bits == 8:
        work.copy_(codes)
    else:
        work.view(-1).copy_(unpack(codes, levels.bits))
        work.add_(levels.lowest if levels.centered else levels.lowest + 0.5)
    work.mul_(scales)
    if scratch.rotation is not None:
        rows = work.view(-1, scheme.group)
        scratch.rotation.backward(rows, rows)
    if not direct:
        out.copy_(work)
