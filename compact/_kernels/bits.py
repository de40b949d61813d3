"""Bits: codes of 1, 2 or 4 bits, packed into bytes.

Packing shifts whole words, because torch's strided loops are many times slower. Code j of a byte is at bit j * bits,
lowest first. Words must be little-endian, as on every host of an accelerator that torch supports; the import checks
this.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

if sys.byteorder != "little":
    raise ImportError("compact packs bits by little-endian words; this machine is big-endian")

# Bits per code -> the integer type whose bytes hold the codes of one packed byte.
_WORD = {4: torch.int16, 2: torch.int32, 1: torch.int64}
# Multiplying by this moves the lowest bit of byte i to bit 56 + i. No two products overlap, so nothing carries.
_GATHER_BITS = 0x0102040810204080
# Copies a byte into all eight; the mask, as a signed integer, then leaves bit i of byte i.
_SPREAD_BITS = 0x0101010101010101
_EACH_BIT = 0x8040201008040201 - (1 << 64)


def packed_count(count: int, bits: int) -> int:
    """Bytes of `count` packed codes."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Pack codes below 2**bits.

    Args:
        codes: uint8 [n], contiguous, aligned to 8 bytes, n a multiple of 8 / bits. Overwritten.
        bits: 1, 2 or 4.
        out: uint8 [n * bits / 8].
    """
    words = codes.view(_WORD[bits])
    if bits == 1:
        out.copy_((words * _GATHER_BITS) >> 56)
        return
    shift = 8 - bits  # each code moves down by this more than the one below it
    moved = words
    for _ in range(8 // bits - 1):
        moved = moved >> shift
        words = words | moved
    out.copy_(words)  # keeps the lowest byte


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack uint8 [n] into codes, uint8 [n * 8 / bits]."""
    words = packed.to(_WORD[bits])
    if bits == 1:
        return ((words * _SPREAD_BITS) & _EACH_BIT).view(torch.uint8).ne_(0)
    mask = sum(((1 << bits) - 1) << (8 * i) for i in range(8 // bits))
    shift = 8 - bits
    moved = words
    for _ in range(8 // bits - 1):
        moved = moved << shift
        words = words | moved
    return (words & mask).view(torch.uint8)
