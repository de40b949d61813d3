"""Every codec against the contract and its own statements, by the suite that is public for codecs of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from compact import PRESETS, Codec, DisguisedBf16, Exact, Mask, Narrow, Projected, Quantized, Sampled, Verbatim
from compact.testing import check_codec

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

QUANTIZED = [
    *(Quantized(kind) for kind in ("int8", "int4", "int2", "e4m3", "e5m2")),
    *(Quantized(kind, rounding="stochastic") for kind in ("int8", "int4", "int2")),
    *(Quantized(kind, rounding="stochastic", along="tokens") for kind in ("int8", "int4", "int2")),
    *(Quantized(kind, rounding="stochastic", rotate=True) for kind in ("int8", "int4", "int2")),
    *(Quantized(kind, rotate=True) for kind in ("int8", "int4", "int2", "e4m3")),
    Quantized("e4m3", along="tokens"),
    # Other groups: odd multiples of 8, which share no period with blocks or noise, and large ones.
    Quantized("int8", 128),
    Quantized("int4", 24, "stochastic"),
    Quantized("int2", 16, "stochastic", rotate=True),
    Quantized("int4", 256, "stochastic", rotate=True),
    Quantized("int8", 200000),
]


@dataclass(frozen=True)
class Case:
    codec: Codec
    dtypes: Sequence[torch.dtype]


EXACT = [
    Case(Verbatim(), (*FLOATS, torch.float64, torch.complex64, torch.bool, *INTEGERS)),
    Case(Exact(), (*FLOATS, torch.float64, torch.complex64, torch.bool, *INTEGERS)),
    Case(Mask(), (*FLOATS, torch.float64, torch.bool, *INTEGERS)),
    Case(Narrow(), INTEGERS),
    Case(DisguisedBf16(), (torch.float32,)),
]


PROJECTED = [
    Projected(),
    Projected(0.5, "rademacher"),
    Projected(0.25, "orthonormal"),
    Projected(0.25, "sparse"),
    Projected(8, "orthonormal"),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("codec", QUANTIZED, ids=lambda codec: codec.name)
def test_quantized(codec: Quantized) -> None:
    check_codec(lambda: Quantized(codec.kind, codec.group, codec.rounding, codec.along, codec.rotate), dtypes=FLOATS)


@pytest.mark.parametrize("codec", [Quantized("int8"), Quantized("int4", rounding="stochastic")], ids=lambda c: c.name)
def test_quantized_takes_fp64(codec: Quantized) -> None:
    check_codec(lambda: codec, dtypes=(torch.float64,))


@pytest.mark.parametrize("codec", PROJECTED, ids=lambda codec: codec.name)
def test_projected(codec: Projected) -> None:
    check_codec(lambda: Projected(codec.rank, codec.kind), dtypes=FLOATS)


@pytest.mark.parametrize("rank", [0.25, 0.9, 8])
def test_sampled(rank: float) -> None:
    check_codec(lambda: Sampled(rank), dtypes=(*FLOATS, torch.float64))


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.codec.name)
def test_exact(case: Case) -> None:
    check_codec(lambda: type(case.codec)(), dtypes=case.dtypes)


@pytest.mark.parametrize("name", PRESETS)
def test_no_codec_of_a_preset_goes_unchecked(name: str) -> None:
    checked = {codec.name for codec in (*QUANTIZED, *PROJECTED)} | {case.codec.name for case in EXACT}
    assert {codec.name for codec in PRESETS[name].table.values()} <= checked
