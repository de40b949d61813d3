"""Codec: the protocol for packing a tensor into fewer bytes and unpacking it, and `Packed`, the packed form.

Guarantees of every codec (`compact.testing.check_codec` tests them):

1. `decode(encode(x))` has x's shape, dtype and strides, on the device of the packed buffers; its values are within the
   errors that `properties` states.
2. `packed_nbytes` tells the size before encoding. Exceptions are stated there.
3. A tensor that the codec does not take is refused by `packed_nbytes` too, with an equal error, before any encoding.
4. NaN and infinity come back bit for bit in their places, and appear nowhere else.
5. Equal input, key and device give equal bytes. Randomness comes from the key alone: torch's generators are not used.
6. The input is not changed, and the packed buffers share no memory with it.

An encode may depend on the values (are all finite? do they fit 16 bits?), and reading a value from a device stalls the
host. So an encode has two steps. `begin` queues the work and a flag, and returns. The caller queues a copy of the flag
to the host and, once that has arrived, passes it to `finish`, which decides; in the engine a later pack or unpack hook
does so. On a CPU nothing waits, and `encode` does both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .._errors import PackedError
from .strided import Spec


@dataclass(frozen=True, kw_only=True)
class Properties:
    """Properties that a codec states about itself. Errors below 2**-100 are not counted anywhere.

    Attributes:
        exact: every bit comes back.
        unbiased: averaged over keys, decoded values are the input's, up to fp32 and output rounding.
        keyed: the packed bytes depend on the key.
        bits_per_element: packed bits per stored element, scales included, for a tensor of many elements (at the end of
            a small one, part of a group counts as a whole). None where values, dtype or width decide; it is then at
            most the input's own.
        error_of_largest: bound on the error of each element as a share of the largest magnitude in its group, output
            rounding aside; None where there is no such bound below that of `relative_error`.
        relative_error: bound of |decoded - x| / |x| (Frobenius) for every draw and every x, output rounding aside;
            typical errors are far lower. Infinite where no draw is bounded.
    """

    exact: bool
    unbiased: bool
    keyed: bool
    bits_per_element: float | None
    error_of_largest: float | None
    relative_error: float

    @property
    def kept_bits(self) -> float:
        """Bits an element keeps, infinite for exact codecs: the more, the more savers of a tensor it serves."""
        return math.inf if self.exact else self.bits_per_element or 0.0


@dataclass(frozen=True, slots=True)
class Packed:
    """The packed form of one tensor.

    Attributes:
        spec: of the tensor that was packed.
        form: one of the codec's forms ("verbatim" where the values allow no smaller one).
        buffers: uint8 [nbytes], contiguous, with memory of their own.
        numbers: small integers that the form needs.
    """

    spec: Spec
    form: str
    buffers: tuple[Tensor, ...]
    numbers: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Total bytes of the buffers."""
        return sum(buffer.numel() for buffer in self.buffers)


class Pending:
    """An encode under way. It holds the tensor until `finish`; the tensor must not change before that.

    Attributes:
        flag: small tensor on the tensor's device that `finish` decides by; None if there is nothing to decide.
        verbatim: already known to become a copy of the stored bytes, which `finish` would make. A caller that only
            wants fewer bytes need not call it.
    """

    __slots__ = ("_decide", "_packed", "flag", "verbatim")

    def __init__(self, flag: Tensor | None, decide: Callable[[Any], Packed], *, verbatim: bool = False) -> None:
        self.flag = flag
        self.verbatim = verbatim
        self._decide: Callable[[Any], Packed] | None = decide
        self._packed: Packed | None = None

    def finish(self, flag: Tensor | None = None) -> Packed:
        """Return the packed form. `flag` is `self.flag` copied to the host; without it this call waits for the device.

        May queue further work on the device's current stream. Later calls return that object again.
        """
        if self._packed is None:
            assert self._decide is not None
            known = self.flag if flag is None else flag
            self._packed = self._decide(None if known is None else known.tolist())
            self._decide = self.flag = None  # releases the tensor
        return self._packed


class Codec(Protocol):
    """Protocol of a codec. Immutable, so that threads may share one. Subclasses inherit `encode`."""

    @property
    def name(self) -> str:
        """Short name for tables, unique to the codec and its settings."""

    @property
    def properties(self) -> Properties:
        """The codec's statements about itself."""

    def packed_nbytes(self, spec: Spec) -> int:
        """Bytes of the packed form; an upper bound where `bits_per_element` is None.

        There is one exception: a lossy codec keeps a tensor verbatim (`spec.stored_bytes`) if it holds NaN, infinity
        or magnitudes too near the end of its dtype's range to be scaled.

        Raises:
            UnsupportedTensor: a dtype the codec does not take.
            GroupError: a group that does not divide.
        """

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        """Queue the encoding without waiting for a device. Raises as `packed_nbytes` does.

        Args:
            tensor: strided, any shape.
            key: 64 bits that seed stochastic rounding (see `compact.key`); used by keyed codecs only.
        """

    def encode(self, tensor: Tensor, key: int = 0) -> Packed:
        """Call `begin` and `finish`. Waits for a device where values decide."""
        return self.begin(tensor, key).finish()

    def decode(self, packed: Packed) -> Tensor:
        """Unpack the tensor on the buffers' device. Raises PackedError for bytes that this codec did not make."""


def view_as(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """View a uint8 buffer's bytes as another dtype; copy them if they are not aligned for it."""
    if buffer.storage_offset() % dtype.itemsize:
        buffer = buffer.clone()
    return buffer.view(dtype)


def check_packed(packed: Packed, codec: str, nbytes: dict[str, int]) -> Tensor:
    """Return the one buffer of a packed tensor. `nbytes`: its size for each form that is known. Raises PackedError."""
    if packed.form not in nbytes:
        raise PackedError(
            f"{codec} was asked to decode a tensor packed as {packed.form!r}; it knows {sorted(nbytes)}: "
            "decode with the codec that encoded"
        )
    wanted, found = nbytes[packed.form], [b.numel() for b in packed.buffers]
    if found != [wanted]:
        raise PackedError(
            f"{codec} needs one buffer of {wanted} bytes for a {packed.spec.dtype} tensor of shape "
            f"{list(packed.spec.shape)} packed as {packed.form!r}, but got {found}: give back what `encode` returned"
        )
    return packed.buffers[0]


def verbatim(stored: Tensor, spec: Spec) -> Packed:
    """Pack the stored elements as they are, into memory of their own."""
    return Packed(spec, "verbatim", (stored.clone().view(torch.uint8),))
