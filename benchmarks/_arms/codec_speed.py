"""The codec arms: speed of the codecs and of `compact_linear`, in turns within one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import compact
from compact import Codec

from .._processes.serve import Tell

# Number of elements for measuring an error: enough for three digits.
_ERROR_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class Case:
    """A codec and its input: `data` names the values, `dtype` their type."""

    codec: Codec
    data: str
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name of the codec, and of the values unless they are normal."""
        return self.codec.name if self.data == "normal" else f"{self.codec.name}, {self.data}"

    @property
    def type_name(self) -> str:
        """The name of the type, such as "float32"."""
        return str(self.dtype).removeprefix("torch.")


def cases() -> list[Case]:
    """List every codec with the types it takes; codecs of floating-point numbers with fp32 and bf16."""
    quantized = [
        compact.Quantized("int8"),
        compact.Quantized("int8", rounding="stochastic"),
        compact.Quantized("int8", along="tokens"),
        compact.Quantized("int8", rotate=True),
        compact.Quantized("int4"),
        compact.Quantized("int4", rotate=True),
        compact.Quantized("int4", rounding="stochastic", rotate=True),
        compact.Quantized("int2", rounding="stochastic", rotate=True),
        compact.Quantized("e4m3"),
        compact.Quantized("e5m2"),
    ]
    projected = [compact.Projected(0.25, kind) for kind in ("gaussian", "rademacher", "orthonormal", "sparse")]
    codecs: tuple[Codec, ...] = (compact.Verbatim(), *quantized, *projected, compact.Sampled(0.25))
    found = [Case(codec, "normal", dtype) for codec in codecs for dtype in (torch.float32, torch.bfloat16)]
    return [
        *found,
        Case(compact.Exact(), "normal", torch.float32),
        Case(compact.DisguisedBf16(), "bf16 values", torch.float32),
        Case(compact.Mask(), "dropout mask", torch.float32),
        Case(compact.Mask(), "mask", torch.bool),
        Case(compact.Narrow(), "token ids", torch.int64),
    ]


def make_data(data: str, dtype: torch.dtype, tokens: int, width: int, seed: int) -> Tensor:
    """Make a tensor [tokens, width] of a kind of values; a pure function of its arguments."""
    generator = torch.Generator().manual_seed(seed)
    if data == "token ids":
        return torch.randint(50_257, (tokens, width), generator=generator, dtype=dtype)
    if data in ("mask", "dropout mask"):
        kept = torch.rand(tokens, width, generator=generator) >= 0.1
        return kept if dtype is torch.bool else kept.to(dtype) / 0.9
    values = torch.randn(tokens, width, generator=generator)
    if data == "bf16 values":
        values = values.bfloat16()
    return values.to(dtype)


def measure_codecs(options: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Time every codec, in turns, on one core.

    Options: `tokens` and `width` of the tensor; timed `rounds`, after one that warms up.

    Returns:
        For each case: input bytes per second (a list per direction), bytes before and after, and the error of one draw.
    """
    torch.set_num_threads(1)
    tokens, width, rounds = options["tokens"], options["width"], options["rounds"]
    chosen, inputs = cases(), dict[tuple[str, torch.dtype], Tensor]()
    found = []
    for case in chosen:
        kind = (case.data, case.dtype)
        if kind not in inputs:
            inputs[kind] = make_data(*kind, tokens, width, seed=0)
        found.append(_facts(case, inputs[kind], tokens, width))
    for number in range(1 + rounds):
        order = list(zip(chosen, found, strict=True))
        for case, facts in order if number % 2 == 0 else reversed(order):
            tensor = inputs[case.data, case.dtype]
            encode_s, decode_s = _turn(case.codec, tensor, compact.key(number, case.name))
            if number:
                facts["encode_bytes_per_s"].append(facts["input_bytes"] / encode_s)
                facts["decode_bytes_per_s"].append(facts["input_bytes"] / decode_s)
        tell(f"round {number} of {rounds}")
    return {"codecs": found}


def _facts(case: Case, tensor: Tensor, tokens: int, width: int) -> dict[str, Any]:
    packed = case.codec.encode(tensor, compact.key(0, "size"))
    drawn = make_data(case.data, case.dtype, max(1, min(tokens, _ERROR_ELEMENTS // width)), width, seed=1)
    back = case.codec.decode(case.codec.encode(drawn, compact.key(1, case.name)))
    same = torch.equal(drawn.view(torch.uint8), back.view(torch.uint8))
    return {
        "codec": case.name,
        "dtype": case.type_name,
        "input_bytes": tensor.nbytes,
        "packed_bytes": packed.nbytes,
        "exact": case.codec.properties.exact,
        "error": 0.0 if same else compact.relative_error(back, drawn),
        "encode_bytes_per_s": [],
        "decode_bytes_per_s": [],
    }


def _turn(codec: Codec, tensor: Tensor, key: int) -> tuple[float, float]:
    begun_s = time.perf_counter()
    packed = codec.encode(tensor, key)
    encoded_s = time.perf_counter()
    codec.decode(packed)
    return encoded_s - begun_s, time.perf_counter() - encoded_s


def measure_linear(options: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Time forward and backward of one layer, as `nn.Linear` and as `compact_linear`, in turns.

    Options: `tokens`, `width` (n), `out`, `rank`, `rounds` (after one that warms up), `threads`.

    Returns:
        Seconds per round of each.
    """
    torch.set_num_threads(options["threads"])
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(options["width"], options["out"])
    x = torch.randn(options["tokens"], options["width"], generator=generator).requires_grad_()
    grad = torch.randn(options["tokens"], options["out"], generator=generator)

    def small(key: int) -> Tensor:
        return compact.compact_linear(x, layer.weight, layer.bias, rank=options["rank"], key=key)

    arms: dict[str, Callable[[int], Tensor]] = {"nn.Linear": lambda _: layer(x), "compact_linear": small}
    found: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(1 + options["rounds"]):
        for name in arms if number % 2 == 0 else reversed(arms):
            layer.zero_grad()
            x.grad = None
            begun_s = time.perf_counter()
            # A new key for each step, as in training: making the projection is part of the cost.
            arms[name](compact.key(0, "layer", number)).backward(grad)
            if number:
                found[name].append(time.perf_counter() - begun_s)
        tell(f"round {number} of {options['rounds']}")
    return {"seconds": found}
