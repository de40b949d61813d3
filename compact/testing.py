"""check_codec: the contract of `Codec` as a test for authors of codecs. Public and pytest-free.

    check_codec(lambda: Quantized("int4", rounding="stochastic"))

Raises ContractError at the first violation. Deterministic: its inputs come from its own generators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ._codecs.codec import Codec, Packed
from ._codecs.exact import BITS_OF
from ._codecs.strided import Spec, shares_memory
from ._errors import CodecError
from ._measures import bias

__all__ = ["ContractError", "check_codec", "edge_tensors"]

Result = TypeVar("Result")

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_FLOOR = 2.0**-100  # errors below this never count: see `Properties`
# With 256 draws an unbiased codec's ratio (`compact.Bias`) is 1 to a few percent; a bias of 5% of one draw's error
# gives 1.6.
_RATIO = 1.4


class ContractError(AssertionError):
    """A codec that violates its contract or its own `properties`."""


def check_codec(
    make: Callable[[], Codec], *, dtypes: Sequence[torch.dtype] = FLOATS, device: str = "cpu", draws: int = 256
) -> None:
    """Check a codec's shapes, strides, dtypes, bytes, errors, bias, non-finite values, keys and use of generators.

    A codec may refuse a tensor with a CodecError if its `packed_nbytes` does too, but not all tensors of a dtype.

    Args:
        make: makes the codec; called more than once, because equal codecs must decode each other's bytes.
        dtypes: the dtypes that the codec takes.
        device: where to run.
        draws: for the bias; the smallest detectable bias falls as 1 / sqrt(draws).

    Raises:
        ContractError: the codec violates the contract.
    """
    codec, other = make(), make()
    states = _generator_states(device)
    for dtype in dtypes:
        taken = 0
        for what, tensor in edge_tensors(dtype, device).items():
            taken += _check_tensor(codec, other, tensor, f"{codec.name}, {dtype}, {what}")
        _require(taken > 0, f"{codec.name} refused every tensor of {dtype}")
        if dtype.is_floating_point:
            _check_error(codec, dtype, device)
            _check_non_finite(codec, dtype, device)
        _check_keys(codec, dtype, device)
    if codec.properties.unbiased and not codec.properties.exact:
        _check_bias(codec, device, draws)
    same = all(torch.equal(a, b) for a, b in zip(states, _generator_states(device), strict=True))
    _require(same, f"{codec.name} drew from torch's default generator")


def edge_tensors(dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Make ordinary and unusual tensors by name: empty, scalar, permuted, with gaps, expanded, overlapping.

    No last dimension exceeds 256, because a codec's work may grow with its square.
    """
    square, cube = _values((256, 256), dtype, device, 1), _values((4, 64, 192), dtype, device, 2)
    few = _values((7,), dtype, device, 3)
    return {
        "scalar": few[3],
        "empty": few[:0],
        "empty in the middle": cube[:, :0],
        "one": few[:1],
        "few": few,
        "square": square,
        "cube": cube,
        "zeros": torch.zeros_like(square),
        "one past a power of two": _values((43691, 3), dtype, device, 4),
        "transposed": square[:128].t(),
        "permuted": cube.permute(2, 0, 1),
        "heads": cube.view(4, 64, 3, 64).transpose(1, 2),
        "rows apart": square[::2],
        "columns apart": square[:, ::2],
        "offset": square.view(-1)[6:].view(-1, 10),
        "inner part": cube[1:3, 3:60, 5:69],
        "expanded": square[:1].expand(128, 256),
        "expanded inside": cube[:, :1].expand(4, 64, 192),
        "expanded scalar": few[0].expand(3, 5),
        "windows": square.view(-1)[:4096].unfold(0, 64, 32),
    }


def _values(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype).to(device)
    if dtype is torch.bool:
        return (torch.rand(shape, generator=generator) < 0.5).to(device)
    if dtype.is_complex:
        return torch.randn((*shape, 2), generator=generator).view(torch.complex64).squeeze(-1).to(dtype).to(device)
    top = min(torch.iinfo(dtype).max, 1000)
    return torch.randint(0, top, shape, generator=generator).to(dtype).to(device)


def _check_tensor(codec: Codec, other: Codec, tensor: Tensor, what: str) -> bool:
    """Check what must hold for any single tensor. False if the codec refused it consistently."""
    spec = Spec.of(tensor)
    promised = _or_refused(lambda: codec.packed_nbytes(spec))
    before = tensor.clone()
    packed = _or_refused(lambda: codec.encode(tensor, 11))
    if promised is None or packed is None:
        _require(promised is None and packed is None, f"{what}: refused by one of packed_nbytes and encode, not both")
        return False
    _require(_bit_equal(tensor, before), f"{what}: encode changed its input")
    _check_packed(packed, tensor, what)
    exactly = codec.properties.bits_per_element is not None
    fits = packed.nbytes == promised if exactly else packed.nbytes <= promised
    _require(fits, f"{what}: {packed.nbytes} packed bytes, but packed_nbytes says {promised}")
    decoded = codec.decode(packed)
    _check_form(decoded, tensor, codec, what)
    _check_close(decoded, tensor, codec, what)
    # Copy the bytes to an odd offset and decode them by another codec with equal settings.
    away = replace(packed, buffers=tuple(torch.cat((b[:1], b))[1:] if b.numel() else b for b in packed.buffers))
    _require(_bit_equal(other.decode(away), decoded), f"{what}: bytes that were moved decode to something else")
    pending = codec.begin(tensor, 11)
    flag = None if pending.flag is None else pending.flag.cpu()
    _require(_same_bytes(pending.finish(flag), packed), f"{what}: begin and finish give other bytes than encode")
    return True


def _check_packed(packed: Packed, tensor: Tensor, what: str) -> None:
    own = tensor.untyped_storage()
    for buffer in packed.buffers:
        _require(
            buffer.dtype is torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous(),
            f"{what}: a buffer is {buffer.dtype}{list(buffer.shape)}, not contiguous uint8 of one dimension",
        )
        _require(buffer.device == tensor.device, f"{what}: a buffer is on {buffer.device}, not {tensor.device}")
        apart = not buffer.numel() or not tensor.numel() or buffer.untyped_storage().data_ptr() != own.data_ptr()
        _require(apart, f"{what}: a buffer shares the input's memory")


def _check_form(decoded: Tensor, tensor: Tensor, codec: Codec, what: str) -> None:
    _require(
        (decoded.shape, decoded.dtype, decoded.device) == (tensor.shape, tensor.dtype, tensor.device),
        f"{what}: came back as {decoded.dtype}{list(decoded.shape)} on {decoded.device}",
    )
    # A lossy codec may give elements that shared memory their own.
    shared = shares_memory(tuple(tensor.shape), tensor.stride())
    if codec.properties.exact or not (shared and decoded.is_contiguous()):
        _require(
            decoded.stride() == tensor.stride(),
            f"{what}: came back with strides {decoded.stride()}, not {tensor.stride()}",
        )


def _check_close(decoded: Tensor, exact: Tensor, codec: Codec, what: str) -> None:
    """Check the stated errors on finite values. Groups are unknown here, so the largest magnitude is the tensor's."""
    if codec.properties.exact or not exact.numel():
        _require(not codec.properties.exact or _bit_equal(decoded, exact), f"{what}: not bit for bit")
        return
    error, size = (decoded.double() - exact.double()).abs(), exact.double().abs()
    rounding = torch.finfo(exact.dtype).eps * decoded.double().abs() + torch.finfo(exact.dtype).tiny + _FLOOR
    share, relative = codec.properties.error_of_largest, codec.properties.relative_error
    if share is not None:
        excess = float((error - rounding).max() / size.max().clamp(min=_FLOOR))
        _require(excess <= share, f"{what}: an element is off by {excess:g} of the largest; {share:g} is stated")
    if math.isinf(relative):
        return  # nothing is stated about a single draw; `_check_bias` checks their mean
    worst = relative * float(size.norm()) + float(rounding.norm())
    _require(
        float(error.norm()) <= worst,
        f"{what}: the error's norm is {float(error.norm()):g}; at most {worst:g} is stated",
    )


def _check_error(codec: Codec, dtype: torch.dtype, device: str) -> None:
    """Check the stated errors on adversarial inputs."""
    for what, values in _hard_values(dtype, device):
        packed = _or_refused(lambda values=values: codec.encode(values, 3))  # type: ignore[misc]
        if packed is not None:
            decoded = codec.decode(packed)
            _require(bool(decoded.isfinite().all()), f"{codec.name}, {dtype}, {what}: finite values became infinite")
            _check_close(decoded, values, codec, f"{codec.name}, {dtype}, {what}")


def _hard_values(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Tensor]]:
    normal = _values((256, 256), torch.float32, device, 5)
    ends = torch.finfo(dtype)
    yield "outliers", (normal**5).clamp(-6e4, 6e4).to(dtype)
    yield "one in a row", torch.where(torch.arange(256, device=device) == 17, normal, 1e-3 * normal).to(dtype)
    yield "one magnitude", normal.sign().to(dtype)
    yield "a large mean", (100 + 0.1 * normal).to(dtype)
    yield "halfway", ((torch.arange(65536, device=device) % 255 - 127).view(256, 256) / 2).to(dtype)
    yield "small", normal.to(dtype) * (64 * ends.tiny)
    yield "the smallest", normal.sign().to(dtype) * (ends.smallest_normal * ends.eps)
    yield "the largest", normal.sign().to(dtype) * ends.max
    yield "large", (normal.clamp(-4, 4) / 4).to(dtype) * ends.max
    yield "zero beside the largest", (normal > 2).to(dtype) * ends.max


def _check_non_finite(codec: Codec, dtype: torch.dtype, device: str) -> None:
    values = _values((256, 256), dtype, device, 6)
    bits = values.view(BITS_OF[dtype.itemsize])
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], dtype=dtype, device=device)
    for count in (1, 2, 3, 4):
        values.view(-1)[1000 * count] = odd[count - 1]
        if count == 4:
            bits.view(-1)[50000] = odd[:1].view(bits.dtype)[0] | 1  # a NaN with a payload
        packed = _or_refused(lambda: codec.encode(values, 3))
        if packed is None:
            continue
        decoded = codec.decode(packed)
        what = f"{codec.name}, {dtype}, {count} special values"
        _check_form(decoded, values, codec, what)
        wrong = ~values.isfinite() & (decoded.view(bits.dtype) != bits)
        _require(not bool(wrong.any()), f"{what}: NaN or infinity did not come back bit for bit")
        spread = values.isfinite() & ~decoded.isfinite()
        _require(not bool(spread.any()), f"{what}: NaN or infinity spread to {int(spread.sum())} finite elements")
        fine = values.isfinite()
        _check_close(decoded.where(fine, 0.0), values.where(fine, 0.0), codec, what)


def _check_keys(codec: Codec, dtype: torch.dtype, device: str) -> None:
    values = _values((256, 256), dtype, device, 7)
    one, again, another = codec.encode(values, 1), codec.encode(values, 1), codec.encode(values, 2)
    _require(_same_bytes(one, again), f"{codec.name}, {dtype}: equal keys gave other bytes")
    keyed = codec.properties.keyed
    _require(
        _same_bytes(one, another) is not keyed,
        f"{codec.name}, {dtype}: says keyed is {keyed}, but another key gave {'equal' if keyed else 'other'} bytes",
    )


def _check_bias(codec: Codec, device: str, draws: int) -> None:
    values = _values((64, 256), torch.float32, device, 8)
    found = bias((codec.decode(codec.encode(values, key)) for key in range(draws)), values)
    _require(
        found.ratio <= _RATIO,
        f"{codec.name} says it is unbiased, but the mean of {draws} draws is off by {found.mean_error:g} and one draw "
        f"by {found.error:g}: (mean / (one / sqrt(draws)))**2 is {found.ratio:g}, not 1",
    )


def _or_refused(call: Callable[[], Result]) -> Result | None:
    try:
        return call()
    except CodecError:
        return None


def _generator_states(device: str) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.device(device).type == "cpu":
        return states
    return [*states, torch.get_device_module(device).get_rng_state(device)]


def _bit_equal(a: Tensor, b: Tensor) -> bool:
    same = (a.shape, a.dtype) == (b.shape, b.dtype)
    return same and torch.equal(*(t.resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def _same_bytes(a: Packed, b: Packed) -> bool:
    same = (a.form, a.numbers, len(a.buffers)) == (b.form, b.numbers, len(b.buffers))
    return same and all(torch.equal(x, y) for x, y in zip(a.buffers, b.buffers, strict=True))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ContractError(message)
