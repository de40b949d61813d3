"""check_codec: a codec with any one defect does not pass, and is told which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compact import (
    Packed,
    Pending,
    Properties,
    Quantized,
    Spec,
    UnsupportedTensor,
    Verbatim,
)
from compact.testing import ContractError, check_codec, edge_tensors


class Wrapped:
    """A sound codec, to be spoilt at one place."""

    def __init__(self, codec: Quantized | Verbatim | None = None) -> None:
        self.codec = codec or Quantized("int8", rounding="stochastic")

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def properties(self) -> Properties:
        return self.codec.properties

    def packed_nbytes(self, spec: Spec) -> int:
        return self.codec.packed_nbytes(spec)

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        return self.codec.begin(tensor, key)

    def encode(self, tensor: Tensor, key: int = 0) -> Packed:
        return self.begin(tensor, key).finish()

    def decode(self, packed: Packed) -> Tensor:
        return self.codec.decode(packed)


def states(change: dict[str, object]) -> property:
    return property(lambda self: replace(self.codec.properties, **change))


class Shrinks(Wrapped):
    """A bias of a tenth of one draw's error."""

    def decode(self, packed: Packed) -> Tensor:
        decoded = self.codec.decode(packed)
        return decoded.mul_(1 - 8e-4) if decoded.shape == (64, 256) else decoded


class SaysKeyed(Wrapped):
    properties = states({"keyed": True, "unbiased": False})

    def __init__(self) -> None:
        super().__init__(Quantized("int8"))


class SaysNotKeyed(Wrapped):
    properties = states({"keyed": False})


class SaysExact(Wrapped):
    properties = states({"exact": True})


class UnderstatesLargest(Wrapped):
    properties = states({"error_of_largest": 0.6 / 127})


class UnderstatesRelative(Wrapped):
    properties = states({"error_of_largest": None, "relative_error": 0.004})


class PromisesLess(Wrapped):
    def packed_nbytes(self, spec: Spec) -> int:
        return max(self.codec.packed_nbytes(spec) - 1, 0)


class Contiguous(Wrapped):
    def decode(self, packed: Packed) -> Tensor:
        return self.codec.decode(packed).contiguous()


class Reshapes(Wrapped):
    def decode(self, packed: Packed) -> Tensor:
        return self.codec.decode(packed).unsqueeze(0)


class Upcasts(Wrapped):
    def decode(self, packed: Packed) -> Tensor:
        return self.codec.decode(packed).float()


class WritesIntoItsInput(Wrapped):
    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        pending = self.codec.begin(tensor, key)
        if tensor.shape == (256, 256):
            tensor[0, 0] += 1
        return pending


class SharesMemory(Wrapped):
    def __init__(self) -> None:
        super().__init__(Verbatim())

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        packed = self.codec.encode(tensor, key)
        if tensor.is_contiguous() and tensor.numel():
            packed = replace(packed, buffers=(tensor.view(-1).view(torch.uint8),))
        return Pending(None, lambda _: packed)


class PacksIntegers(Wrapped):
    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        packed = self.codec.encode(tensor, key)
        return Pending(None, lambda _: replace(packed, buffers=tuple(b.view(torch.int8) for b in packed.buffers)))


class DrawsFromTheDefaultGenerator(Wrapped):
    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        torch.rand(1)
        return self.codec.begin(tensor, key)


class ForgetsTheKey(Wrapped):
    """Other bytes at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        self.calls += 1
        return self.codec.begin(tensor, self.calls)


class RefusesLate(Wrapped):
    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        if tensor.dim() == 0:
            raise UnsupportedTensor("no scalars")
        return self.codec.begin(tensor, key)


class RefusesAll(Wrapped):
    def packed_nbytes(self, spec: Spec) -> int:
        raise UnsupportedTensor("nothing")

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        raise UnsupportedTensor("nothing")


class HidesNan(Wrapped):
    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        return self.codec.begin(tensor if bool(tensor.isfinite().all()) else tensor.nan_to_num(), key)


class SpreadsNan(Wrapped):
    def decode(self, packed: Packed) -> Tensor:
        decoded = self.codec.decode(packed)
        rows = decoded.isnan().any(-1, keepdim=True) if decoded.dim() else decoded.isnan()
        return decoded.masked_fill_(rows & decoded.isfinite(), torch.nan) if bool(rows.any()) else decoded


class Flushes(Wrapped):
    """The bits of one negative zero."""

    def __init__(self) -> None:
        super().__init__(Verbatim())

    def decode(self, packed: Packed) -> Tensor:
        decoded = self.codec.decode(packed)
        return decoded.copy_(decoded + 0.0) if decoded.shape == (256, 256) else decoded


class Remembers(Wrapped):
    """Decodes what it encoded last, whatever bytes it is given; another of its kind cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def begin(self, tensor: Tensor, key: int = 0) -> Pending:
        self.last = self.codec.decode(self.codec.encode(tensor, key))
        return self.codec.begin(tensor, key)

    def decode(self, packed: Packed) -> Tensor:
        return torch.zeros(packed.spec.shape, dtype=packed.spec.dtype) if self.last is None else self.last


DEFECTS = {
    Shrinks: "says it is unbiased",
    SaysKeyed: "another key gave equal bytes",
    SaysNotKeyed: "another key gave other bytes",
    SaysExact: "not bit for bit",
    UnderstatesLargest: "of the largest; ",
    UnderstatesRelative: "the error's norm",
    PromisesLess: "packed_nbytes says",
    Contiguous: "strides",
    Reshapes: "came back as",
    Upcasts: "came back as torch.float32",
    WritesIntoItsInput: "changed its input",
    SharesMemory: "shares the input's memory",
    PacksIntegers: "not contiguous uint8",
    DrawsFromTheDefaultGenerator: "default generator",
    ForgetsTheKey: "begin and finish give other bytes",
    RefusesLate: "refused by one of",
    RefusesAll: "refused every tensor",
    HidesNan: "did not come back bit for bit",
    SpreadsNan: "spread to",
    Flushes: "not bit for bit|did not come back",
    Remembers: "decode to something else",
}


@pytest.mark.parametrize(("make", "message"), DEFECTS.items(), ids=[make.__name__ for make in DEFECTS])
def test_a_defect_is_found(make: Callable[[], Wrapped], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_codec(make)


@pytest.mark.parametrize("codec", [Quantized("int8", rounding="stochastic"), Quantized("int4"), Verbatim()])
def test_the_wrapper_itself_has_none(codec: Quantized | Verbatim) -> None:
    check_codec(lambda: Wrapped(codec))


def test_edge_tensors_are_what_they_are_called() -> None:
    tensors = edge_tensors(torch.float32)
    assert tensors["scalar"].shape == ()
    assert tensors["empty"].numel() == tensors["empty in the middle"].numel() == 0
    assert not any(tensors[name].is_contiguous() for name in ("transposed", "permuted", "heads", "rows apart"))
    assert tensors["offset"].storage_offset() == 6
    assert tensors["expanded"].stride() == (0, 1)
    assert tensors["windows"].numel() > 4096
    assert tensors["one past a power of two"].numel() == (1 << 17) + 1
    assert all(tensor.dim() == 0 or tensor.shape[-1] <= 256 for tensor in tensors.values())
    again = edge_tensors(torch.float32)
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
