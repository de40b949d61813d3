"""Codec: the protocol of what makes a tensor smaller and gives it back, and `Packed`, the smaller form.

Guarantees every codec gives (`compact.testing.check_codec` holds codecs to them):

1. `decode(encode(x))` has x's shape, dtype and strides, on the device of the packed buffers; its values are as
   `properties` say.
2. Packed bytes are known before encoding: `packed_nbytes`. Exceptions are stated there.
3. What a codec does not take is refused by `packed_nbytes` too, with the same error, before anything is encoded.
4. NaN and infinity come back where they were, bit for bit, and nowhere else.
5. Equal input, key and device give equal bytes. Randomness comes from the key alone: torch's generators are not used.
6. The input is not changed, and the packed buffers share no memory with it.

An encode may depend on the values (are all finite? do they fit 16 bits?), and asking a device stalls the host. So an
encode has two steps: `begin` queues the work and returns; whoever waits for the device later anyway (the thread that
copies the bytes out, after its event) calls `finish`, which looks at the flag and decides. On a CPU nothing waits and
`encode` does both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .._errors import PackedError
from .strided import Spec


@dataclass(frozen=True, kw_only=True)
class Properties:
    """What a codec states about itself. Errors of less than 2**-100 are not counted anywhere.

    Attributes:
        exact: every bit comes back.
        unbiased: averaged over keys, decoded values are the input's, up to fp32 and output rounding.
        keyed: the packed bytes depend on the key.
        bits_per_element: packed bits per stored element, scales included, for a tensor of many elements (at the end of
            a small one, part of a group counts as a whole); None where values, dtype or width decide: then at most the
            input's own.
        error_of_largest: no element is off by more than this share of the largest magnitude in its group, output
            rounding aside; None where there is no such bound below that of `relative_error`.
        relative_error: bound of |decoded - x| / |x| (Frobenius) for every draw and every x; typical errors are far
            lower. Output rounding aside. Infinite where no draw is bounded.
    """

    exact: bool
    unbiased: bool
    keyed: bool
    bits_per_element: float | None
    error_of_largest: float | None
    relative_error: float


@dataclass(frozen=True, slots=True)
class Packed:
    """The small form of one tensor.

    Attributes:
        spec: of the tensor that was packed.
        form: which of the codec's forms this is ("verbatim" when values forbade a smaller one).
        buffers: uint8 [nbytes], contiguous, with memory of their own.
        numbers: small integers the form needs.
    """

    spec: Spec
    form: str
    buffers: tuple[Tensor, ...]
    numbers: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for buffer in self.buffers)


class Pending:
    """An encode under way. It holds the tensor until `finish`; the tensor must not change before.

    Attributes:
        flag: a small tensor on the tensor's device that `finish` decides by; None when there is nothing to decide.
        verbatim: it is known already that the packed form is a copy of the stored bytes, which `finish` has yet to
            make: whoever only wants fewer bytes need not call it.
    """

    __slots__ = ("_decide", "_packed", "flag", "verbatim")

    def __init__(self, flag: Tensor | None, decide: Callable[[Any], Packed], *, verbatim: bool = False) -> None:
        self.flag = flag
        self.verbatim = verbatim
        self._decide: Callable[[Any], Packed] | None = decide
        self._packed: Packed | None = None

    def finish(self, flag: Tensor | None = None) -> Packed:
        """The packed form. `flag` is `self.flag` copied to the host; without it this call waits for the device.

        May queue further work on the device's current stream. A second call returns the same object.
        """
        if self._packed is None:
            assert self._decide is not None
            known = self.flag if flag is None else flag
            self._packed = self._decide(None if known is None else known.tolist())
            self._decide = self.flag = None  # lets go of the tensor
        return self._packed


class Codec(Protocol):
    """Makes tensors smaller. Immutable, so one may serve many threads. Subclasses inherit `encode`."""

    @property
    def name(self) -> str:
        """Short and unique with its settings, for tables."""

    @property
    def properties(self) -> Properties:
        """What it states."""

    def packed_nbytes(self, spec: Spec) -> int:
        """Bytes of the packed form. Where `bits_per_element` is None an upper bound.

        Exceeded in one case: a lossy codec keeps a tensor verbatim (`spec.stored_bytes`) when it holds NaN, infinity
        or magnitudes too near the end of its dtype's range to be scaled.

        Raises:
            UnsupportedTensor: a dtype the codec does not take.
            GroupError: a group that does not divide.
        """

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        """Queue the encoding, without waiting for a device. Raises what `packed_nbytes` raises.

        Args:
            tensor: strided, any shape.
            key: 64 bits that seed stochastic rounding (`compact.key` makes them); used by keyed codecs only.
        """

    def encode(self, tensor: Tensor, key: int = 0) -> Packed:
        """`begin` and `finish` at once. Waits for a device where values decide."""
        return self.begin(tensor, key).finish()

    def decode(self, packed: Packed) -> Tensor:
        """The tensor, on the buffers' device. Raises PackedError for what this codec did not make."""


def view_as(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """A uint8 buffer's bytes as another dtype; copied if they begin where that dtype cannot."""
    if buffer.storage_offset() % dtype.itemsize:
        buffer = buffer.clone()
    return buffer.view(dtype)


def check_packed(packed: Packed, codec: str, nbytes: dict[str, int]) -> Tensor:
    """The one buffer of a packed tensor whose form is one of `nbytes`, with that many bytes. Raises PackedError."""
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


def verbatim(tensor_flat: Tensor, spec: Spec) -> Packed:
    """The stored elements as they are, in memory of their own."""
    return Packed(spec, "verbatim", (tensor_flat.clone().view(torch.uint8),))
