"""Exact codecs: fewer bytes for tensors that do not need all of theirs; every bit comes back.

Values decide whether a tensor fits, so each codec queues a small flag and decides in `Pending.finish`. A tensor that
does not fit is kept verbatim. Values are treated as integers: -0.0, NaN payloads and denormals are ordinary bit
patterns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .._errors import UnsupportedTensor
from .._kernels.bits import pack, packed_count, unpack
from .._kernels.grouped import DEVICE_BLOCK
from .codec import Codec, Packed, Pending, Properties, check_packed, verbatim, view_as
from .strided import Spec, Target, flat

# Width in bytes -> the integer dtype for bit patterns.
BITS_OF = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# On a CPU the first elements rule out most tensors that do not fit, without reading the rest. The few of a glance rule
# out nearly as many for a tenth of the time, as each operator takes some microseconds.
_LOOK = 4096
_GLANCE = 16
_CPU_BLOCK = 1 << 20  # elements at a time, so that no temporary is as large as the tensor; see `DEVICE_BLOCK`


@dataclass(frozen=True)
class Verbatim(Codec):
    """A `Codec` that keeps the stored bytes of any dtype unchanged. Expanded elements are stored once.

    The other exact codecs derive from it and fall back to it.
    """

    name = "verbatim"
    properties = Properties(
        exact=True, unbiased=True, keyed=False, bits_per_element=None, error_of_largest=0.0, relative_error=0.0
    )
    takes = "every dtype"

    def packed_nbytes(self, spec: Spec) -> int:
        """Bytes of the stored elements, the most that any form takes. Raises UnsupportedTensor."""
        if not self._takes(spec.dtype):
            raise UnsupportedTensor(
                f"{self.name} was given a {spec.dtype} tensor of shape {list(spec.shape)}: it takes {self.takes}; "
                "use Exact"
            )
        return spec.stored_bytes

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        """Queue nothing: `finish` copies the bytes."""
        spec, values = self._open(tensor)
        return Pending(None, lambda _: verbatim(values, spec), verbatim=True)

    def decode(self, packed: Packed) -> Tensor:
        """Unpack the tensor, bit for bit, on the buffers' device."""
        spec = packed.spec
        buffer = check_packed(packed, self.name, {"verbatim": spec.stored_bytes, **self._forms(packed)})
        as_bytes = spec.dtype is torch.bool  # see `_open`
        target = Target(spec._replace(dtype=torch.uint8) if as_bytes else spec, buffer.device)
        if packed.form == "verbatim":
            target.flat.copy_(view_as(buffer, target.flat.dtype))
        else:
            self._restore(packed, buffer, target.flat)
        made = target.tensor()
        return made.view(torch.bool) if as_bytes else made

    def _takes(self, dtype: torch.dtype) -> bool:
        return True

    def _open(self, tensor: Tensor) -> tuple[Spec, Tensor]:
        """Return the spec and the stored elements. Raises UnsupportedTensor."""
        spec = Spec.of(tensor)
        self.packed_nbytes(spec)
        # Memory viewed as boolean may hold bytes other than 0 and 1, which PyTorch's copies of booleans change.
        return spec, flat(tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor)

    def _forms(self, packed: Packed) -> dict[str, int]:
        return {}

    def _restore(self, packed: Packed, buffer: Tensor, out: Tensor) -> None:
        """Write the stored elements of one of the codec's own forms into `out`."""


@dataclass(frozen=True)
class Mask(Verbatim):
    """A `Codec` for tensors with two values, one bit each: booleans, and float masks such as dropout's 0 and 1/q.

    Takes every real dtype of 1, 2, 4 or 8 bytes. Compares bit patterns, so 0.0 and -0.0 differ, and memory viewed as
    boolean may hold bytes other than 0 and 1.
    """

    name = "mask"
    takes = "elements of 1, 2, 4 or 8 bytes that are not complex"

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        """Queue the comparisons. The flag holds the two bit patterns and whether there is no third."""
        spec, values = self._open(tensor)
        bits = values.view(BITS_OF[spec.dtype.itemsize])
        if not bits.numel():
            return super().begin(tensor)
        low, high = torch.aminmax(bits)
        is_high = bits == high
        two = (is_high | (bits == low)).all()

        def decide(flag: list[int]) -> Packed:
            if not flag[2]:
                return verbatim(values, spec)
            return Packed(spec, "bits", (_pack_bits(is_high),), (flag[0], flag[1]))

        return Pending(torch.stack((low.to(torch.int64), high.to(torch.int64), two.to(torch.int64))), decide)

    def _takes(self, dtype: torch.dtype) -> bool:
        return dtype.itemsize in BITS_OF and not dtype.is_complex

    def _forms(self, packed: Packed) -> dict[str, int]:
        return {"bits": packed_count(packed.spec.stored_numel, 1)}

    def _restore(self, packed: Packed, buffer: Tensor, out: Tensor) -> None:
        is_high = unpack(buffer, 1)[: out.numel()].view(torch.bool)
        low, high = packed.numbers
        out.view(BITS_OF[out.dtype.itemsize]).fill_(low).masked_fill_(is_high, high)


def _pack_bits(mask: Tensor) -> Tensor:
    """Pack a flat boolean tensor, 8 elements a byte."""
    codes = functional.pad(mask.view(torch.uint8), (0, -mask.numel() % 8))
    packed = codes.new_empty(packed_count(mask.numel(), 1))
    pack(codes, 1, packed)
    return packed


@dataclass(frozen=True)
class Narrow(Verbatim):
    """A `Codec` for integers: 0, 1, 2 or 4 bytes each, as their range needs.

    Token ids of a vocabulary of up to 65,536 take 2 of int64's 8 bytes.
    """

    name = "narrow"
    takes = "uint8 and signed integers"

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        """Queue the flag: the smallest and the largest value. `finish` queues the rest."""
        spec, values = self._open(tensor)
        if not values.numel():
            return super().begin(tensor)

        def decide(flag: list[int]) -> Packed:
            low, high = flag
            width = next(w for w in (0, 1, 2, 4, 8) if high - low < 1 << (8 * w))
            if width >= spec.dtype.itemsize:
                return verbatim(values, spec)
            if width == 0:
                return Packed(spec, "narrow", (values.new_empty(0, dtype=torch.uint8),), (low, 0))
            # Relative to the middle, so that codes fill a signed integer of that width.
            middle = low + (1 << (8 * width - 1))
            codes = (values.to(torch.int64) - middle).to(BITS_OF[width])
            return Packed(spec, "narrow", (codes.view(torch.uint8),), (middle, width))

        return Pending(torch.stack(torch.aminmax(values)).to(torch.int64), decide)

    def _takes(self, dtype: torch.dtype) -> bool:
        return dtype in _INTEGERS

    def _forms(self, packed: Packed) -> dict[str, int]:
        width = packed.numbers[1] if len(packed.numbers) == 2 else 0
        return {"narrow": width * packed.spec.stored_numel}

    def _restore(self, packed: Packed, buffer: Tensor, out: Tensor) -> None:
        middle, width = packed.numbers
        if width == 0:
            out.fill_(middle)
        else:
            out.copy_(view_as(buffer, BITS_OF[width]).to(torch.int64).add_(middle))


@dataclass(frozen=True)
class DisguisedBf16(Verbatim):
    """A `Codec` for fp32 that holds bf16 values (an upcast under autocast, a norm's fp32 copy): their upper halves."""

    name = "disguised-bf16"
    takes = "float32"

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        """Queue the flag: the largest lower half, 0 if all are zero. `finish` queues the upper halves."""
        spec, values = self._open(tensor)
        bits = values.view(torch.int32)
        if not bits.numel() or (bits.device.type == "cpu" and bool((bits[:_LOOK] & 0xFFFF).any())):
            return Pending(None, lambda _: verbatim(values, spec), verbatim=True)
        flag = torch.stack([(block & 0xFFFF).amax() for block in bits.split(_block(bits))]).amax()
        return Pending(flag, lambda rest: verbatim(values, spec) if rest else Packed(spec, "upper", (_upper(bits),)))

    def _takes(self, dtype: torch.dtype) -> bool:
        return dtype is torch.float32

    def _forms(self, packed: Packed) -> dict[str, int]:
        return {"upper": 2 * packed.spec.stored_numel}

    def _restore(self, packed: Packed, buffer: Tensor, out: Tensor) -> None:
        bits = out.view(torch.int32)
        bits.copy_(view_as(buffer, torch.int16))
        bits.bitwise_left_shift_(16)


def _block(bits: Tensor) -> int:
    return _CPU_BLOCK if bits.device.type == "cpu" else DEVICE_BLOCK


def _upper(bits: Tensor) -> Tensor:
    """The upper 16 bits of each int32, as bytes."""
    upper = bits.new_empty(bits.numel(), dtype=torch.int16)
    for source, half in zip(bits.split(_block(bits)), upper.split(_block(bits)), strict=True):
        half.copy_(source >> 16)
    return upper.view(torch.uint8)


@dataclass(frozen=True)
class Exact(Verbatim):
    """A `Codec` for any plain tensor that picks another codec by dtype.

    `Mask` for booleans and, on a CPU, for floats that look like dropout's mask; `Narrow` for integers; `DisguisedBf16`
    for fp32; else `Verbatim`.
    """

    name = "exact"

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        if _fits_nothing(tensor):
            return Verbatim().begin(tensor, key)
        codec = Mask() if _looks_like_a_mask(tensor) else _by_dtype(tensor.dtype)
        return codec.begin(tensor, key)

    def packed_nbytes(self, spec: Spec) -> int:
        return _by_dtype(spec.dtype).packed_nbytes(spec)

    def decode(self, packed: Packed) -> Tensor:
        return (Mask() if packed.form == "bits" else _by_dtype(packed.spec.dtype)).decode(packed)


def _is_told_by_values(tensor: Tensor) -> bool:
    """Whether to look at a float tensor's values: only on a CPU, as it would stall a device."""
    return tensor.is_floating_point() and tensor.device.type == "cpu" and tensor.dtype.itemsize in BITS_OF


def _fits_nothing(tensor: Tensor) -> bool:
    """Whether a glance shows that a float tensor is no mask and does not hold bf16 values."""
    if not _is_told_by_values(tensor):
        return False
    bits = flat(tensor)[:_GLANCE].view(BITS_OF[tensor.dtype.itemsize]).tolist()
    return len(set(bits)) > 2 and (tensor.dtype is not torch.float32 or any(value & 0xFFFF for value in bits))


def _looks_like_a_mask(tensor: Tensor) -> bool:
    """Whether the first elements of a float tensor have at most two values."""
    if not _is_told_by_values(tensor):
        return False
    bits = flat(tensor)[:_LOOK].view(BITS_OF[tensor.dtype.itemsize])
    if not bits.numel():
        return False
    low, high = torch.aminmax(bits)
    return bool(((bits == low) | (bits == high)).all())


def _by_dtype(dtype: torch.dtype) -> Codec:
    if dtype is torch.bool:
        return Mask()
    if dtype in _INTEGERS:
        return Narrow()
    return DisguisedBf16() if dtype is torch.float32 else Verbatim()
