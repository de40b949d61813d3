"""Quantized: int8, int4, int2 and fp8 codes with one fp32 scale per group.

Error of one element, in units of its group's largest magnitude (`top` is 127, 7, 1.5), before fp32 rounding:

nearest      at most 1 / (2 top), deterministic; for tensors that backward is nonlinear in (norms, gates, attention)
stochastic   below 1 / top, unbiased, variance at most 1 / (4 top**2); for tensors that backward is linear in (inputs
             of linear layers), whose gradient is then unbiased: ActNN (arXiv 2104.14129), section 3
fp8          e4m3: 2**-4 of the element, e5m2: 2**-3, nearest

A group of `group` numbers shares a scale of 32 bits: with 64, int8 takes 8.5 bits per element, int4 4.5, int2 2.5.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from .._errors import CodecError, GroupError, UnsupportedTensor
from .._kernels import grouped
from .._kernels.grouped import E4M3, E5M2, INT2, INT4, INT8, Levels, Scheme
from .._kernels.hadamard import is_rotatable
from .._kernels.noise import Noise
from .codec import FLOATS, Codec, Packed, Pending, Properties, check_packed, verbatim, view_as
from .exact import Verbatim
from .strided import Spec, Target, flat

QuantizedKind = Literal["int8", "int4", "int2", "e4m3", "e5m2"]
Rounding = Literal["nearest", "stochastic"]
Along = Literal["elements", "tokens"]

_LEVELS: dict[str, Levels] = {"int8": INT8, "int4": INT4, "int2": INT2, "e4m3": E4M3, "e5m2": E5M2}
# fp8 -> half a unit in the last place, relative; half of the smallest step; half of the step below `top`.
_FP8_ERROR = {"e4m3": (2.0**-4, 2.0**-10, 16.0), "e5m2": (2.0**-3, 2.0**-17, 4096.0)}
_SLACK = 1 + 2.0**-20  # for the four fp32 roundings of an encode and a decode


@dataclass(frozen=True)
class Quantized(Codec):
    """A `Codec` for floating-point tensors (bf16, fp16, fp32; fp64 through fp32).

    Strides come back exactly, except that with groups along tokens a tensor whose elements share memory comes back
    contiguous.

    Args:
        kind: "int8", "int4", "int2", or the 8-bit floats "e4m3" and "e5m2".
        group: how many numbers share a scale, a multiple of 8.
        rounding: "nearest" or "stochastic" (keyed, unbiased; integers only).
        along: "elements": neighbors in memory; a tensor's last group may be short. "tokens": one channel of consecutive
            tokens (all but the last dimension, flattened); GroupError if the group does not divide them.
        rotate: apply a Hadamard rotation to each group first, against outliers; needs a group of 16, 64 or 256, not
            along tokens.

    Raises:
        CodecError: settings that conflict.
    """

    kind: QuantizedKind
    group: int = 64
    rounding: Rounding = "nearest"
    along: Along = "elements"
    rotate: bool = False

    def __post_init__(self) -> None:
        for what, value, known in (
            ("kind", self.kind, tuple(_LEVELS)),
            ("rounding", self.rounding, ("nearest", "stochastic")),
            ("along", self.along, ("elements", "tokens")),
        ):
            if value not in known:
                raise CodecError(f"{what} {value!r} is not known: choose one of {', '.join(known)}")
        if self.group < 8 or self.group % 8:
            raise CodecError(f"a group of {self.group} cannot be packed into bytes: choose a multiple of 8")
        if self.rounding == "stochastic" and _LEVELS[self.kind].floating is not None:
            raise CodecError(f"{self.kind} rounds to nearest only: choose int8, int4 or int2 for stochastic rounding")
        if self.rotate and not is_rotatable(self.group):
            raise CodecError(f"a group of {self.group} has no exact rotation: choose 16, 64 or 256")
        if self.rotate and self.along == "tokens":
            raise CodecError("rotation mixes neighboring channels, but groups run along tokens: choose one of them")

    @property
    def name(self) -> str:
        """For example "int4/64 stochastic rotated" or "int8/64 tokens"; defaults are left out."""
        parts = [f"{self.kind}/{self.group}"]
        parts += ["stochastic"] * (self.rounding == "stochastic") + ["rotated"] * self.rotate
        return " ".join([*parts, *["tokens"] * self._by_tokens])

    @functools.cached_property
    def properties(self) -> Properties:
        """What the codec states about itself; the table at the top of this module explains the numbers."""
        levels, stochastic, root = _LEVELS[self.kind], self.rounding == "stochastic", math.sqrt(self.group)
        if levels.floating is None:
            largest = (1.0 if stochastic else 0.5) / levels.top
            relative = largest * root  # the worst group: one number at the top, all others off by the bound
        else:
            of_element, smallest, below_top = _FP8_ERROR[self.kind]
            largest = below_top / levels.top
            relative = of_element + smallest / levels.top * root
        return Properties(
            exact=False,
            unbiased=stochastic,
            keyed=stochastic,
            bits_per_element=levels.bits + 32 / self.group,
            error_of_largest=None if self.rotate else largest * _SLACK,
            relative_error=relative * _SLACK,
        )

    def packed_nbytes(self, spec: Spec) -> int:
        """Bytes of scales and codes; a short last group counts as a whole one. Raises as `Codec.packed_nbytes`."""
        scheme, count = self._scheme(spec), self._count(spec)
        return 4 * scheme.groups(count) + scheme.code_bytes(count)

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        """Queue the encoding. The flag is False if the tensor must be kept verbatim."""
        spec = Spec.of(tensor)
        scheme, count = self._scheme(spec), self._count(spec)
        values = flat(tensor, logical=self._by_tokens)
        buffer = torch.empty(self.packed_nbytes(spec), dtype=torch.uint8, device=values.device)
        packed = Packed(spec, "codes", (buffer,))
        if not count:
            return Pending(None, lambda _: packed)
        scales, codes = buffer[: 4 * scheme.groups(count)].view(torch.float32), buffer[4 * scheme.groups(count) :]
        noise = Noise(key, scheme.groups(count) * self.group, values.device) if self.rounding == "stochastic" else None
        _run("encode", values, scheme, values, scheme, noise, scales, codes)
        # NaN and infinity make their group's scale NaN or infinite, so one comparison finds them all.
        flag = scales.amax() < self._limit(spec.dtype)
        return Pending(flag, lambda fine: packed if fine else verbatim(flat(tensor), spec))

    def decode(self, packed: Packed) -> Tensor:
        spec = packed.spec
        buffer = check_packed(packed, self.name, {"codes": self.packed_nbytes(spec), "verbatim": spec.stored_bytes})
        if packed.form == "verbatim":
            return Verbatim().decode(packed)
        target = Target(spec, buffer.device, logical=self._by_tokens)
        scheme, count = self._scheme(spec), self._count(spec)
        if count:
            scales, codes = buffer[: 4 * scheme.groups(count)], buffer[4 * scheme.groups(count) :]
            _run("decode", target.flat, scheme, codes, view_as(scales, torch.float32), scheme, target.flat)
        return target.tensor()

    def _limit(self, dtype: torch.dtype) -> float:
        """The smallest scale that is too large: decoded numbers could leave the range of fp32 or of the dtype."""
        limit = 2.0**127
        if self.rotate:  # rotating back adds up a group's numbers before the factor 1 / sqrt(g)
            limit = min(limit / self.group, torch.finfo(dtype).max / (2 * math.sqrt(self.group)))
        return limit / _LEVELS[self.kind].top

    @property
    def _by_tokens(self) -> bool:
        return self.along == "tokens"

    def _count(self, spec: Spec) -> int:
        return spec.numel if self._by_tokens else spec.stored_numel

    def _scheme(self, spec: Spec) -> Scheme:
        if spec.dtype not in FLOATS:
            raise UnsupportedTensor(
                f"{self.name} was given a {spec.dtype} tensor of shape {list(spec.shape)}: it takes bfloat16, float16, "
                "float32 and float64; use Exact"
            )
        columns = 1
        if self._by_tokens and spec.numel:
            columns = spec.shape[-1] if spec.shape else 1
            tokens = spec.numel // columns
            if tokens % self.group:
                raise GroupError(
                    f"{self.name} was given a tensor of shape {list(spec.shape)}: its {tokens} tokens are not a "
                    f"multiple of the group of {self.group} ({tokens % self.group} are left over); choose a group that "
                    'divides, or along="elements", which takes any length'
                )
        return Scheme(_LEVELS[self.kind], self.group, columns, self.rotate)


_LIBRARIES = {"cuda": "triton", "cpu": "numba"}
_LACKS = (torch.OutOfMemoryError, MemoryError)
_failed: set[str] = set()  # kinds of device for which nothing can be compiled


@functools.cache
def _fused(library: str) -> ModuleType | None:
    """Import our kernels for triton or numba; None if that library is missing or does not work here."""
    try:
        importlib.import_module(library)
    except ImportError:
        return None
    # Outside the `try`, so that errors in our own module show.
    return importlib.import_module(f".._kernels.{library}_kernels", __package__)


def _run(name: str, values: Tensor, scheme: Scheme, *arguments: object) -> None:
    """Call `encode` or `decode` of the kernels for these values; of `grouped` from when triton's cannot be compiled."""
    kernels = _kernels(values, scheme)
    try:
        getattr(kernels, name)(*arguments)
    except Exception as error:  # of a compiler: no C compiler, no headers of Python's, a device that it does not know
        if kernels is grouped or _LIBRARIES[values.device.type] != "triton" or isinstance(error, _LACKS):
            raise
        _failed.add(values.device.type)
        warnings.warn(
            f"triton cannot compile here ({error}): PyTorch's kernels take its place, slower and with the same bits. "
            "Triton needs a C compiler (gcc, or what CC names) and Python's headers",
            RuntimeWarning,
            stacklevel=2,
        )
        getattr(grouped, name)(*arguments)


def _kernels(values: Tensor, scheme: Scheme) -> ModuleType:
    """The module whose `encode` and `decode` apply."""
    library = None if values.device.type in _failed else _LIBRARIES.get(values.device.type)
    fused = _fused(library) if library else None
    return fused if fused is not None and fused.supports(scheme, values.dtype) else grouped
