"""Bits: codes side by side in bytes."""

from __future__ import annotations

import pytest
import torch

from compact._kernels.bits import pack, packed_count, unpack


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_each_byte_holds_its_codes_lowest_first(bits: int) -> None:
    """Every byte there is, in every place of a word: unpacked, its codes are its digits in base 2**bits."""
    every = torch.arange(256, dtype=torch.uint8)
    codes = unpack(every, bits)
    per = 8 // bits
    wanted = [(byte >> (bits * i)) & ((1 << bits) - 1) for byte in range(256) for i in range(per)]
    assert codes.dtype is torch.uint8
    assert codes.tolist() == wanted
    out = torch.zeros(256, dtype=torch.uint8)
    pack(codes, bits, out)
    assert torch.equal(out, every)


@pytest.mark.parametrize(("count", "bits", "nbytes"), [(0, 1, 0), (1, 1, 1), (8, 1, 1), (9, 1, 2), (5, 4, 3)])
def test_packed_count_rounds_up(count: int, bits: int, nbytes: int) -> None:
    assert packed_count(count, bits) == nbytes
