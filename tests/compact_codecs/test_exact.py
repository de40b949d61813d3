"""Exact codecs: every bit pattern comes back, in as many bytes as its values need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compact import DisguisedBf16, Exact, Mask, Narrow, PackedError, Quantized, Spec, UnsupportedTensor, Verbatim
from support.exactness import assert_bit_equal

BF16_BITS = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)


def test_every_bf16_bit_pattern_comes_back_from_fp32() -> None:
    """All 65536: both zeros, denormals, infinities, every NaN payload."""
    values = (BF16_BITS.to(torch.int32) << 16).view(torch.float32)
    packed = DisguisedBf16().encode(values)
    assert (packed.form, packed.nbytes) == ("upper", 2 * 65536)
    assert_bit_equal(packed.buffers[0].view(torch.int16), BF16_BITS)
    assert_bit_equal(DisguisedBf16().decode(packed), values)


@pytest.mark.parametrize("place", [0, 5000, 3_000_000 - 1])
@pytest.mark.parametrize("bit", [0, 15])
def test_one_lower_bit_anywhere_keeps_fp32(place: int, bit: int) -> None:
    values = torch.randn(3_000_000).bfloat16().float()
    assert Exact().encode(values).nbytes == 6_000_000
    values.view(torch.int32)[place] |= 1 << bit
    packed = Exact().encode(values)
    assert (packed.form, packed.nbytes) == ("verbatim", 12_000_000)
    assert_bit_equal(Exact().decode(packed), values)


def test_the_flag_decides_on_disguise_without_looking_at_the_tensor() -> None:
    values = torch.randn(64).bfloat16().float()
    pending = DisguisedBf16().begin(values)
    assert pending.flag is not None
    assert pending.flag.tolist() == 0
    assert pending.finish(torch.tensor(1, dtype=torch.int32)).form == "verbatim"


def test_looking_for_a_disguise_copies_nothing() -> None:
    """Most fp32 tensors are none: on a device, where all are looked at, their halves must not be made in forward."""
    values = torch.zeros(3 << 20)
    with _Largest() as made:
        pending = DisguisedBf16().begin(values)
    assert 0 < made.nbytes <= values.nbytes // 3
    with made:
        pending.finish()
    assert made.nbytes == values.nbytes // 2


class _Largest(TorchDispatchMode):
    """The bytes of the largest storage that an operator has made."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and all(arg is not out for arg in args) and not function.is_view:
            self.nbytes = max(self.nbytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000, 4096])
def test_booleans_take_one_bit(count: int) -> None:
    mask = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.3
    packed = Exact().encode(mask)
    assert packed.nbytes == -(-count // 8)
    assert Exact().packed_nbytes(Spec.of(mask)) == count  # what it may take at most
    assert_bit_equal(Exact().decode(packed), mask)
    if count > 1:  # else the one value is both patterns
        bits = [bool(packed.buffers[0][i // 8] >> (i % 8) & 1) for i in range(count)]
        assert bits == mask.tolist()


@pytest.mark.parametrize(("values", "form"), [([0, 2, 0], "bits"), ([1, 2, 1], "bits"), ([0, 1, 2], "verbatim")])
def test_booleans_keep_the_bytes_they_have(values: list[int], form: str) -> None:
    mask = torch.tensor(values, dtype=torch.uint8).view(torch.bool)
    packed = Exact().encode(mask)
    assert packed.form == form
    assert_bit_equal(Exact().decode(packed).view(torch.uint8), mask.view(torch.uint8))


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([0.0, -0.0, 0.0]),
        torch.tensor([float("nan"), float("inf"), float("nan")]),
        torch.tensor([1.5]),
        torch.tensor([5, -5, 5], dtype=torch.int64),
        torch.tensor([-(2**63), 2**63 - 1], dtype=torch.int64),
    ],
    ids=["zeros", "nan", "one value", "integers", "extremes"],
)
def test_two_bit_patterns_are_enough_for_a_mask(values: Tensor) -> None:
    packed = Mask().encode(values)
    assert packed.form == "bits"
    assert_bit_equal(Mask().decode(packed), values)


@pytest.mark.parametrize(
    ("low", "high", "width"),
    [
        (7, 7, 0),
        (0, 255, 1),
        (-128, 127, 1),
        (1000, 1255, 1),
        (0, 256, 2),
        (0, 50256, 2),
        (0, 65535, 2),
        (0, 65536, 4),
        (-(2**40), -(2**40) + 2**32 - 1, 4),
        (0, 2**32, 8),
        (-(2**63), 2**63 - 1, 8),
        (-(2**63), -(2**63) + 255, 1),
        (2**63 - 256, 2**63 - 1, 1),
    ],
)
def test_integers_take_what_their_range_needs(low: int, high: int, width: int) -> None:
    values = torch.tensor([low, high, low + (high - low) // 2, high, low] * 3, dtype=torch.int64)
    packed = Narrow().encode(values)
    assert packed.nbytes == 15 * width
    assert packed.form == ("verbatim" if width == 8 else "narrow")
    assert_bit_equal(Narrow().decode(packed), values)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_other_integers_narrow_too(dtype: torch.dtype) -> None:
    ends = torch.iinfo(dtype)
    for values in (torch.tensor([ends.min, ends.max, 0], dtype=dtype), torch.tensor([3, 4, 5], dtype=dtype)):
        packed = Narrow().encode(values)
        assert packed.nbytes == (3 if int(values[0]) == 3 else values.nbytes)
        assert_bit_equal(Narrow().decode(packed), values)


def test_a_conjugate_comes_back_resolved() -> None:
    values = torch.randn(5, dtype=torch.complex64).conj()
    decoded = Verbatim().decode(Verbatim().encode(values))
    assert not decoded.is_conj()
    assert_bit_equal(decoded, values.resolve_conj())


@pytest.mark.parametrize("codec", [Narrow(), DisguisedBf16()])
def test_a_dtype_that_is_not_taken_is_refused_before_encoding(codec: Narrow | DisguisedBf16) -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    for call in (codec.encode, codec.begin, lambda t: codec.packed_nbytes(Spec.of(t))):
        with pytest.raises(UnsupportedTensor, match=rf"{codec.name} was given a torch.bfloat16 .* shape \[2, 3\]"):
            call(tensor)


def test_bytes_of_another_codec_are_refused() -> None:
    with pytest.raises(PackedError, match=r"packed as 'codes'.*decode with the codec that encoded"):
        Exact().decode(Quantized("int8").encode(torch.randn(64)))
    packed = Verbatim().encode(torch.zeros(2))
    with pytest.raises(PackedError, match="needs one buffer of 8 bytes"):
        Verbatim().decode(replace(packed, buffers=(packed.buffers[0][:7],)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_exact_packs_a_dropout_mask_of_floats(dtype: torch.dtype) -> None:
    mask = torch.nn.functional.dropout(torch.ones(200, 64, dtype=dtype), 0.25)
    packed = Exact().encode(mask)
    assert packed.nbytes == mask.numel() // 8
    assert torch.equal(Exact().decode(packed), mask)
    mask[150, 3] = 0.5  # behind what was looked at: a third value
    again = Exact().encode(mask)
    assert again.nbytes == mask.nbytes
    assert torch.equal(Exact().decode(again), mask)


def test_a_device_looks_at_a_large_tensor_in_few_blocks() -> None:
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return function(*args, **(kwargs or {}))

    with Count() as count:
        DisguisedBf16().begin(torch.empty(1 << 26, device="meta")).finish(torch.tensor(0))
    assert count.calls < 40
