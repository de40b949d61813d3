"""Fused kernels: equal to the torch version to the last bit, rotation and stochastic rounding included.

Where triton is installed without a device, its interpreter runs the kernels on the CPU, in a process of its own, since
Triton decides when it is imported. On a CUDA device they are compiled. Numba's are compiled here.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch

from compact import Codec, DisguisedBf16, Mask, Quantized, Spec
from compact._codecs import quantized
from compact._kernels import grouped
from compact._kernels.noise import Noise

KINDS = ("int8", "int4", "int2")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES_OF_A_TYPE = 2 * 2 * 3 * 3  # of a kind and a dtype


def equal(kernels: ModuleType, codec: Quantized, values: torch.Tensor) -> bool:
    """Whether scales, codes and decoded values are those of `grouped`."""
    scheme = codec._scheme(Spec.of(values))
    assert kernels.supports(scheme, values.dtype)
    groups, found = scheme.groups(len(values)), []
    noise = Noise(3, groups * codec.group, values.device) if codec.rounding == "stochastic" else None
    for module in (grouped, kernels):
        scales = torch.empty(groups, device=values.device)
        codes = torch.empty(scheme.code_bytes(len(values)), dtype=torch.uint8, device=values.device)
        module.encode(values, scheme, noise, scales, codes)
        out = torch.empty_like(values)
        module.decode(codes, scales, scheme, out)
        found.append([t.view(torch.uint8) for t in (scales, codes, out)])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def compare(module: str, device: str, kinds: tuple[str, ...], dtypes: tuple[torch.dtype, ...] = DTYPES) -> int:
    """How many cases have been compared, all equal."""
    kernels, count = importlib.import_module(module), 0
    for kind in kinds:
        for rounding in ("nearest", "stochastic"):
            for rotate in (False, True):
                for group in (16, 64, 256):
                    for dtype in dtypes:
                        for size in (1, 64, 10007):
                            values = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
                            values[size // 2 :] *= 100
                            if size > 1000:
                                values[100:400] = 0
                                values[500:600] = -1e-39  # denormal in fp32, beside one that is not
                                values[600] = 1
                            codec = Quantized(kind, group, rounding, rotate=rotate)  # type: ignore[arg-type]
                            assert equal(kernels, codec, values.to(device)), (codec.name, dtype, size)
                            count += 1
    return count


def compare_apart(device: str, *kinds: str, **environment: str) -> int:
    """`compare` Triton's in a process of its own."""
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(here.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = f"from test_kernels import compare; print(compare('compact._kernels.triton_kernels', {device!r}, {kinds!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed; it comes with torch's CUDA builds"
)
needs_numba = pytest.mark.skipif(quantized._fused("numba") is None, reason="numba is not installed, or cannot be used")


@needs_triton
@pytest.mark.slow
def test_interpreted_triton_equals_torch() -> None:
    assert compare_apart("cpu", *KINDS, TRITON_INTERPRET="1") == len(KINDS) * len(DTYPES) * CASES_OF_A_TYPE


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_compiled_triton_equals_torch() -> None:
    # Some 500 compilations, a third of a second each: a process for each kind.
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda kind: compare_apart("cuda", kind), KINDS))
    assert found == [len(DTYPES) * CASES_OF_A_TYPE] * len(KINDS)


@needs_numba
def test_numba_equals_torch() -> None:
    dtypes = (torch.float32, torch.bfloat16)
    assert compare("compact._kernels.numba_kernels", "cpu", KINDS, dtypes) == len(KINDS) * len(dtypes) * CASES_OF_A_TYPE


@needs_numba
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_does_not_slip_through_numba(dtype: torch.dtype, bad: float) -> None:
    codec, kernels = Quantized("int8"), quantized._fused("numba")
    values = torch.randn(200).to(dtype)
    values[70] = bad
    assert kernels is not None
    assert quantized._kernels(values, codec._scheme(Spec.of(values))) is kernels
    packed = codec.encode(values)
    assert packed.form == "verbatim"
    assert torch.equal(codec.decode(packed).view(torch.int16), values.view(torch.int16))


@needs_numba
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_with_and_without_numba_the_same_bytes(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000, 300, requires_grad=True).t()  # gradients and strides are nothing to the kernels
    codec = Quantized("int4", rounding=rounding, rotate=True)  # type: ignore[arg-type]
    fused = codec.encode(values, 7)
    monkeypatch.setattr(quantized, "_fused", lambda name: None)
    plain = codec.encode(values, 7)
    assert torch.equal(fused.buffers[0], plain.buffers[0])
    assert torch.equal(codec.decode(fused), codec.decode(plain))


def test_without_numba_torch_does_it() -> None:
    code = (
        "import sys, torch; sys.modules['numba'] = None  # importing it fails, as where it is absent or too old\n"
        "from compact import Quantized\n"
        "from compact._codecs import quantized\n"
        "codec = Quantized('int8'); packed = codec.encode(torch.ones(64))\n"
        "assert quantized._fused('numba') is None\n"
        "print(codec.decode(packed).sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kind", ["int8", "int4", "int2"])
def test_a_device_packs_the_bytes_the_cpu_packs(kind, rotate) -> None:  # type: ignore[no-untyped-def]
    values = torch.randn(1000, 300, generator=torch.Generator().manual_seed(0))
    codec = Quantized(kind, rounding="stochastic", rotate=rotate)
    here, there = codec.encode(values, 7), codec.encode(values.cuda(), 7)
    assert torch.equal(here.buffers[0], there.buffers[0].cpu())
    assert torch.equal(codec.decode(here), codec.decode(there).cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "codec",
    [Quantized("int4", rounding="stochastic", rotate=True), Quantized("e4m3"), Mask(), DisguisedBf16()],
    ids=lambda codec: codec.name,
)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_begin_does_not_wait_for_the_device(codec: Codec) -> None:
    values = torch.ones(1 << 16, device="cuda")
    codec.encode(values, 1)  # compiles, and makes what is kept
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = codec.begin(values, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(codec.decode(pending.finish()).cpu(), codec.decode(codec.encode(values, 2)).cpu())


def test_the_cpu_does_without_triton() -> None:
    code = "import sys, torch, compact; c = compact.Quantized('int8'); c.decode(c.encode(torch.ones(64)))"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}; print('triton' in sys.modules, 'compact._kernels.triton_kernels' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == "False"
    assert Quantized("int8").packed_nbytes(Spec.of(torch.ones(64))) == 68
