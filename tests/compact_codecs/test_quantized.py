"""Quantised: equal to a plain numpy reference to the last bit, within its bounds group by group, unbiased."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from compact import CodecError, GroupError, Packed, PackedError, Quantized, Spec, UnsupportedTensor
from compact import key as make_key
from compact._codecs import quantized
from compact._kernels import grouped
from compact._kernels.hadamard import weights
from compact._seeds import uniform_bits
from support.exactness import assert_bit_equal

TOP = {"int8": 127.0, "int4": 7.0, "int2": 1.5}
PERIOD = 8192


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain_noise(key: int, count: int) -> np.ndarray:
    """The dither of stochastic rounding, element by element as the module describes it. fp32 [count]."""

    def halves(name: str, number: int) -> np.ndarray:
        words = uniform_bits(make_key(key, name), -(-number // 2), "cpu").numpy()
        return words.view(np.int16)[:number].astype(np.int64)

    index = np.arange(count)
    base, shift = halves("base", PERIOD) | 1, halves("shift", -(-count // PERIOD)) & ~1
    return ((base[index % PERIOD] ^ shift[index // PERIOD]) * 2.0**-16).astype(np.float32)


def plain(values: Tensor, codec: Quantized, key: int) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Scales, codes and decoded values of a [tokens, channels] tensor, in numpy fp32, all at once."""
    tokens, channels = values.shape
    x = values.float().numpy()
    if codec.along == "tokens":
        groups = x.reshape(tokens // codec.group, codec.group, channels)
    else:
        groups = x.reshape(-1, codec.group, 1)
    top = np.float32(TOP[codec.kind])
    largest = np.maximum(np.abs(groups).max(1, keepdims=True), np.float32(2.0**-100))
    y = groups * (top / largest)
    if codec.rounding == "stochastic":
        y = y + plain_noise(key, x.size).reshape(groups.shape)
    whole = top == np.floor(top)
    codes = np.rint(y) if whole else np.floor(y)
    lowest, highest = (-top, top) if whole else (-top - np.float32(0.5), top - np.float32(0.5))
    codes = np.clip(codes, lowest, highest)
    scales = largest / top
    decoded = torch.from_numpy((codes + np.float32(0 if whole else 0.5)) * scales).reshape(tokens, channels)
    return scales.reshape(-1), (codes - (0 if top == 127 else lowest)).reshape(-1), decoded.to(values.dtype)


def unpacked(packed: Packed, codec: Quantized) -> tuple[np.ndarray, np.ndarray]:
    """Scales and codes of packed bytes, bit by bit."""
    count = packed.spec.numel
    data = packed.buffers[0].numpy()
    scales, data = data[: 4 * count // codec.group].view(np.float32), data[4 * count // codec.group :]
    bits = {"int8": 8, "int4": 4, "int2": 2}[codec.kind]
    if bits == 8:
        return scales, data.view(np.int8)
    return scales, np.stack([(data >> (bits * i)) & ((1 << bits) - 1) for i in range(8 // bits)], 1).reshape(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("along", ["elements", "tokens"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", ["int8", "int4", "int2"])
def test_equal_to_a_plain_reference_to_the_last_bit(kind, rounding, along, dtype) -> None:  # type: ignore[no-untyped-def]
    # More than a block on the CPU, with a block cut short at the end; magnitudes from 1e-4 to 1e4; a row of zeros.
    values = normal(320, 832) * 10.0 ** (normal(320, 1, seed=1) * 2)
    values[7] = 0
    values = values.clamp(-6e4, 6e4).to(dtype)  # fp16 ends at 65504
    codec = Quantized(kind, 32, rounding, along)
    packed = codec.encode(values, 77)
    scales, codes = unpacked(packed, codec)
    wanted_scales, wanted_codes, wanted = plain(values, codec, 77)
    np.testing.assert_array_equal(scales.view(np.int32), wanted_scales.astype(np.float32).view(np.int32))
    np.testing.assert_array_equal(codes, wanted_codes)
    assert_bit_equal(codec.decode(packed), wanted)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kind", ["int8", "int4", "int2", "e4m3"])
def test_block_size_changes_no_bit(kind, rotate, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    values, rounding = normal(100_003), "nearest" if kind == "e4m3" else "stochastic"
    codec = Quantized(kind, 64, rounding, rotate=rotate)
    packed = codec.encode(values, 5)
    decoded = codec.decode(packed)
    for block in (64, 8192 + 64, 1 << 20):
        monkeypatch.setattr(grouped, "CPU_BLOCK", block)
        again = codec.encode(values, 5)
        assert_bit_equal(again.buffers, packed.buffers)
        assert_bit_equal(codec.decode(again), decoded)


@pytest.mark.parametrize("rotate", [False, True])
def test_neither_threads_nor_the_default_dtype_nor_inference_mode_change_a_bit(rotate: bool) -> None:
    values, codec = normal(1000, 700), Quantized("int4", rounding="stochastic", rotate=rotate)
    wanted = codec.encode(values, 5).buffers
    decoded = codec.decode(codec.encode(values, 5))
    threads, default = torch.get_num_threads(), torch.get_default_dtype()
    weights.cache_clear()
    try:
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.bfloat16)
        with torch.inference_mode():
            packed = codec.encode(values, 5)
        assert_bit_equal(packed.buffers, wanted)
        assert_bit_equal(codec.decode(packed), decoded)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(default)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_fp8_is_torchs_cast_of_the_scaled_value(kind) -> None:  # type: ignore[no-untyped-def]
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    top = torch.finfo(dtype).max
    values = normal(512, 64) * 10.0 ** (normal(512, 64, seed=1) * 3)  # reaches the subnormals of both formats
    largest = values.abs().amax(1, keepdim=True)
    wanted = (values * (top / largest)).to(dtype).float() * (largest / top)
    codec = Quantized(kind)
    assert_bit_equal(codec.decode(codec.encode(values)), wanted)


def test_every_fp8_code_decodes_as_torch_does() -> None:
    for kind, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        codes = torch.arange(256, dtype=torch.uint8)
        wanted = codes.view(dtype).float()
        codec = Quantized(kind, 256)  # type: ignore[arg-type]
        buffer = torch.cat((torch.ones(1).view(torch.uint8), codes))
        packed = Packed(Spec((256,), (1,), torch.float32, torch.device("cpu")), "codes", (buffer,))
        finite = wanted.isfinite()
        assert_bit_equal(codec.decode(packed)[finite], wanted[finite])


@pytest.mark.parametrize(
    ("kind", "rounding"),
    [(kind, rounding) for kind in TOP for rounding in ("nearest", "stochastic")]
    + [("e4m3", "nearest"), ("e5m2", "nearest")],
)
def test_the_error_is_bounded_group_by_group(kind, rounding) -> None:  # type: ignore[no-untyped-def]
    values = normal(2048, 64) * 10.0 ** (normal(2048, 1, seed=1) * 5)
    codec = Quantized(kind, 64, rounding)
    error = (codec.decode(codec.encode(values, 3)) - values).abs().double()
    share = codec.properties.error_of_largest
    assert share is not None
    found = float((error / values.abs().double().amax(1, keepdim=True)).max())
    # Tight: some element of 131072 comes near the bound.
    assert 0.8 * share < found <= share


def test_elements_run_in_memory_order() -> None:
    transposed = normal(64, 128).t()
    codec = Quantized("int8", 64)
    assert_bit_equal(codec.encode(transposed).buffers, codec.encode(transposed.t()).buffers)


def test_tokens_are_elements_of_the_transpose() -> None:
    values = normal(192, 80)
    by_tokens, by_elements = Quantized("int4", along="tokens"), Quantized("int4")
    assert_bit_equal(
        by_tokens.decode(by_tokens.encode(values)).contiguous(),
        by_elements.decode(by_elements.encode(values.t().contiguous())).t().contiguous(),
    )


def test_rotation_takes_the_outlier_out_of_the_step() -> None:
    values = normal(256, 256)
    values[:, 3] *= 60
    errors = []
    for rotate in (False, True):
        codec = Quantized("int4", rotate=rotate)
        errors.append(float((codec.decode(codec.encode(values)) - values)[:, :64].norm()))
    assert errors[1] < 0.45 * errors[0]


@pytest.mark.parametrize("rotate", [False, True])
def test_zero_stays_zero(rotate) -> None:  # type: ignore[no-untyped-def]
    values = normal(4, 256)
    values[1:3] = 0
    for kind in ("int8", "int4", "e4m3"):
        codec = Quantized(kind, rotate=rotate)  # type: ignore[arg-type]
        assert not codec.decode(codec.encode(values))[1:3].any()
    if not rotate:
        values[0, ::2] = 0
        codec = Quantized("int4", rounding="stochastic")
        assert not codec.decode(codec.encode(values, 4))[0, ::2].any()


@pytest.mark.parametrize("shape", [(), (1,), (63,), (64,), (65,), (3, 50)])
def test_a_short_group_counts_as_a_whole_one(shape: tuple[int, ...]) -> None:
    values = normal(*shape)
    for kind, bits in (("int8", 8), ("int4", 4), ("int2", 2)):
        packed = Quantized(kind, 64).encode(values)  # type: ignore[arg-type]
        assert packed.nbytes == -(-values.numel() // 64) * (4 + 64 * bits // 8)


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8.5), ("int4", 4.5), ("int2", 2.5), ("e4m3", 8.5)])
def test_bits_per_element_are_those_of_the_bytes(kind, bits) -> None:  # type: ignore[no-untyped-def]
    codec = Quantized(kind)
    assert codec.properties.bits_per_element == bits
    assert codec.encode(normal(128, 256)).nbytes * 8 == bits * 128 * 256


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rotate", [False, True])
def test_one_value_that_is_not_finite_keeps_the_tensor_verbatim(bad: float, rotate: bool) -> None:
    values = normal(300, 100).t()
    values[17, 250] = bad
    codec = Quantized("int8", rotate=rotate)
    pending = codec.begin(values)
    assert pending.flag is not None
    assert not bool(pending.flag)
    packed = pending.finish()
    assert packed.form == "verbatim"
    assert packed.nbytes == values.nbytes
    assert_bit_equal(codec.decode(packed), values)


def test_magnitudes_that_would_overflow_keep_the_tensor_verbatim() -> None:
    """127 * (largest / 127) rounds to infinity for the largest fp32; rotation may exceed fp16 by far smaller ones."""
    values = normal(64, 64)
    values[0, 0] = torch.finfo(torch.float32).max
    assert Quantized("int8").encode(values).form == "verbatim"
    half = torch.full((64, 64), 2.0**15, dtype=torch.float16)
    assert Quantized("int8", rotate=True).encode(half).form == "verbatim"
    assert Quantized("int8").encode(half).form == "codes"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [16, 64, 256])
@pytest.mark.parametrize("kind", ["int2", "int4", "int8"])
def test_what_a_rotation_adds_up_on_the_way_back_stays_finite(kind, group: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """One large number among tiny ones has the same magnitude everywhere in its group once it is rotated."""
    codec, forms = Quantized(kind, group, "stochastic", rotate=True), []
    for exponent in range(100, 128):
        values = torch.full((4, group), 1e-38, dtype=dtype)
        values[:, 5] = 2.0**exponent
        packed = codec.encode(values, 3)
        decoded = codec.decode(packed)
        assert torch.isfinite(decoded).all()
        forms.append(packed.form)
        if packed.form == "codes":
            assert ((decoded - values).float() / 2.0**exponent).abs().max() < 2 / TOP[kind]
    assert forms == sorted(forms)  # codes up to some magnitude, verbatim from there on
    assert (forms[0], forms[-1]) == ("codes", "verbatim")


def test_finish_decides_by_the_flag_it_is_given_and_lets_the_tensor_go() -> None:
    values = normal(64, 64)
    pending = Quantized("int8").begin(values)
    packed = pending.finish(torch.tensor(False))
    assert packed.form == "verbatim"
    assert pending.finish(torch.tensor(True)) is packed
    assert pending.flag is None


def test_integers_and_booleans_are_refused_with_a_way_out() -> None:
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(UnsupportedTensor, match=f"{dtype} tensor of shape \\[3, 4\\].*use Exact"):
            Quantized("int8").encode(torch.zeros(3, 4, dtype=dtype))


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedTensor, match=r"layout torch.sparse_coo and shape \[2, 2\]"):
        Quantized("int8").encode(torch.eye(2).to_sparse())


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 50, 64), r"shape \[2, 50, 64\]: its 100 tokens are not a multiple of the group of 64 \(36 are"),
        ((64,), "its 1 tokens"),
        ((), "its 1 tokens"),
    ],
)
def test_a_group_that_does_not_divide_is_an_error_with_the_numbers(shape: tuple[int, ...], message: str) -> None:
    codec = Quantized("int8", along="tokens")
    for call in (codec.encode, lambda tensor: codec.packed_nbytes(Spec.of(tensor))):
        with pytest.raises(GroupError, match=message):
            call(normal(*shape))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "int3"}, "kind 'int3' is not known: choose one of int8, int4"),
        ({"kind": "int8", "rounding": "up"}, "rounding 'up'"),
        ({"kind": "int8", "along": "rows"}, "along 'rows'"),
        ({"kind": "int8", "group": 12}, "group of 12"),
        ({"kind": "int8", "group": 0}, "group of 0"),
        ({"kind": "e4m3", "rounding": "stochastic"}, "nearest only"),
        ({"kind": "int4", "group": 32, "rotate": True}, "group of 32 has no exact rotation"),
        ({"kind": "int4", "rotate": True, "along": "tokens"}, "choose one"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, object], message: str) -> None:
    with pytest.raises(CodecError, match=message):
        Quantized(**settings)  # type: ignore[arg-type]


def test_bytes_of_another_codec_are_refused() -> None:
    packed = Quantized("int8").encode(normal(64, 64))
    with pytest.raises(PackedError, match=r"needs one buffer of 2304 bytes.*got \[4352\]"):
        Quantized("int4").decode(packed)
    with pytest.raises(PackedError, match="packed as 'upper'"):
        Quantized("int8").decode(replace(packed, form="upper"))
    with pytest.raises(PackedError, match=r"needs one buffer of 4352 bytes.*got \[4351\]"):
        Quantized("int8").decode(replace(packed, buffers=(packed.buffers[0][1:],)))


def test_names_tell_codecs_apart() -> None:
    codecs = [
        Quantized("int8"),
        Quantized("int8", 128),
        Quantized("int8", rounding="stochastic"),
        Quantized("int8", rotate=True),
        Quantized("int8", along="tokens"),
        Quantized("int4"),
    ]
    assert len({codec.name for codec in codecs}) == len(codecs)
    assert codecs[0].name == "int8/64"


def test_a_tensor_that_requires_grad_is_packed_without_it() -> None:
    values = normal(64, 64).requires_grad_()
    for along in ("elements", "tokens"):
        codec = Quantized("int8", along=along)  # type: ignore[arg-type]
        decoded = codec.decode(codec.encode(values))
        assert not decoded.requires_grad


@pytest.mark.parametrize("fails", ["encode", "decode"])
def test_without_a_compiler_the_bits_are_the_same_with_one_warning(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        calls.append(fails)
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    calls: list[str] = []
    x, codec = torch.randn(3, 1000), Quantized("int8")
    stub = SimpleNamespace(supports=lambda *_: True, encode=grouped.encode, decode=grouped.decode)
    expected = codec.decode(codec.encode(x))
    monkeypatch.setattr(quantized, "_LIBRARIES", {"cpu": "triton"})
    monkeypatch.setattr(quantized, "_failed", set())
    monkeypatch.setattr(quantized, "_fused", lambda library: stub)
    setattr(stub, fails, fail)
    with pytest.warns(RuntimeWarning, match="triton cannot compile here .Failed to find C compiler") as warned:
        results = [codec.decode(codec.encode(x)) for _ in range(3)]
    assert (len(warned), calls) == (1, [fails])
    for result in results:
        assert_bit_equal(result, expected)


def test_a_lack_of_memory_is_no_lack_of_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 bytes.")

    monkeypatch.setattr(quantized, "_LIBRARIES", {"cpu": "triton"})
    monkeypatch.setattr(quantized, "_fused", lambda library: SimpleNamespace(supports=lambda *_: True, encode=fail))
    with pytest.raises(torch.OutOfMemoryError):
        Quantized("int8").encode(torch.ones(64))
