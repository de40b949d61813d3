"""Codec: the protocol for packing a tensor into fewer bytes and unpacking it; and `Packed`, the packed form.

Guarantees of every codec (`compact.testing.check_codec` tests them):

1. `decode(encode(x))` has x's shape, dtype and strides, on the device of the packed buffers; its values are within the
   errors that `properties` states.
2. `packed_nbytes` gives the size before encoding, with the exceptions stated there.
3. `packed_nbytes` also refuses any tensor that the codec does not take, with an equal error, before any encoding.
4. NaN and infinity come back bit for bit in their places, and appear nowhere else.
5. Equal input, key and device give equal bytes. Randomness comes only from the key, never from torch's generators.
6. The input does not change, and the packed buffers share no memory with it.

An encode may depend on the values (are all finite? do they fit 16 bits?), and reading a value from a device stalls the
host. So an encode has two steps. `begin` queues the work and a flag, and returns. The caller queues a copy of the flag
to the host and, once that has arrived, passes it to `finish`, which decides; in the engine a later hook does this. On a
CPU nothing waits, and `encode` does both.
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

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # what lossy codecs take


@dataclass(frozen=True, kw_only=True)
class Properties:
    """What a codec states about itself. Errors below 2**-100 never count.

    Attributes:
        exact: every bit comes back.
        unbiased: averaged over keys, decoded values are the input's, up to fp32 and output rounding.
        keyed: the packed bytes depend on the key.
        bits_per_element: packed bits per stored element, scales included, for a tensor of many elements (a partial last
            group counts as a whole one). None if values, dtype or width decide; then it is at most the input's own.
        error_of_largest: bound on each element's error as a share of the largest magnitude in its group, before output
            rounding; None if no bound is tighter than `relative_error`.
        relative_error: bound on |decoded - x| / |x| (Frobenius) for every draw and every x, before output rounding;
            typical errors are far lower. Infinite if no draw is bounded.
    """

    exact: bool
    unbiased: bool
    keyed: bool
    bits_per_element: float | None
    error_of_largest: float | None
    relative_error: float

    @property
    def kept_bits(self) -> float:
        """Bits an element keeps, infinite for exact codecs: a tensor with several savers gets the codec with most."""
        return math.inf if self.exact else self.bits_per_element or 0.0


@dataclass(frozen=True, slots=True)
class Packed:
    """The packed form of one tensor.

    Attributes:
        spec: of the tensor that was packed.
        form: one of the codec's forms ("verbatim" if the values allow no smaller one).
        buffers: uint8 [nbytes], contiguous, with their own memory.
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
    """An encode in progress. It holds the tensor, which must not change, until `finish`.

    Attributes:
        flag: small tensor on the tensor's device that `finish` decides by; None if there is nothing to decide.
        verbatim: `finish` would only copy the stored bytes. A caller that wants fewer bytes need not call it.
    """

    __slots__ = ("_decide", "_packed", "flag", "verbatim")

    def __init__(self, flag: Tensor | None, decide: Callable[[Any], Packed], *, verbatim: bool = False) -> None:
        self.flag = flag
        self.verbatim = verbatim
        self._decide: Callable[[Any], Packed] | None = decide
        self._packed: Packed | None = None

    def finish(self, flag: Tensor | None = None) -> Packed:
        """Return the packed form. `flag` is `self.flag` on the host; without it this call waits for the device.

        May queue work on the device's current stream. Later calls return the same object.
        """
        if self._packed is None:
            assert self._decide is not None
            known = self.flag if flag is None else flag
            self._packed = self._decide(None if known is None else known.tolist())
            self._decide = self.flag = None  # releases the tensor
        return self._packed


class Codec(Protocol):
    """Protocol of a codec. Immutable, so threads may share one. Subclasses inherit `encode`."""

    @property
    def name(self) -> str:
        """Short name for tables, unique to the codec and its settings."""

    @property
    def properties(self) -> Properties:
        """What the codec states about itself."""

    def packed_nbytes(self, spec: Spec) -> int:
        """Bytes of the packed form; an upper bound if `bits_per_element` is None.

        One exception: a lossy codec keeps a tensor verbatim (`spec.stored_bytes`) if it holds NaN, infinity, or
        magnitudes too close to the end of its dtype's range to be scaled.

        Raises:
            UnsupportedTensor: a dtype that the codec does not take.
            GroupError: a group that does not divide.
        """

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        """Queue the encoding without waiting for a device. Raises as `packed_nbytes` does.

        Args:
            tensor: strided, any shape.
            key: 64 bits that seed stochastic rounding (see `compact.key`); only keyed codecs use it.
        """

    def encode(self, tensor: Tensor, key: int = 0) -> Packed:
        """Call `begin` and `finish`. Waits for a device if values decide."""
        return self.begin(tensor, key).finish()

    def decode(self, packed: Packed) -> Tensor:
        """Unpack the tensor on the buffers' device. Raises PackedError for bytes that this codec did not make."""


def view_as(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """View a uint8 buffer's bytes as another dtype; copy them if they are not aligned for it."""
    if buffer.storage_offset() % dtype.itemsize:
        buffer = buffer.clone()
    return buffer.view(dtype)


def check_packed(packed: Packed, codec: str, nbytes: dict[str, int]) -> Tensor:
    """Return the only buffer of a packed tensor. `nbytes`: its size in each known form. Raises PackedError."""
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
    """Copy the stored elements unchanged."""
    return Packed(spec, "verbatim", (stored.clone().view(torch.uint8),))
