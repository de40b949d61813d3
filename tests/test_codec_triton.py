"""Triton kernels: equal to the torch version to the last bit, rotation and stochastic rounding included.

Where triton is installed without a device, its interpreter runs the kernels on the CPU, in a process of its own, since
Triton decides when it is imported. On a CUDA device they are compiled.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from compact import Codec, DisguisedBf16, Mask, Quantized, Spec

COMPARE = """
import sys
import torch
from compact import Quantized, Spec, _grouped, _triton
from compact._noise import Noise

def compare(codec, values):
    scheme = codec._scheme(Spec.of(values))
    assert _triton.supports(scheme)
    groups, found = scheme.groups(len(values)), []
    noise = Noise(3, groups * codec.group, values.device) if codec.rounding == "stochastic" else None
    for kernels in (_grouped, _triton):
        scales = torch.empty(groups, device=values.device)
        codes = torch.empty(scheme.code_bytes(len(values)), dtype=torch.uint8, device=values.device)
        kernels.encode(values, scheme, noise, scales, codes)
        out = torch.empty_like(values)
        kernels.decode(codes, scales, scheme, out)
        found.append([t.view(torch.uint8) for t in (scales, codes, out)])
    return all(torch.equal(a, b) for a, b in zip(*found))

count = 0
for kind in sys.argv[2:]:
    for rounding in ("nearest", "stochastic"):
        for rotate in (False, True):
            for group in (16, 64, 256):
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    for size in (1, 64, 10007):
                        values = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
                        values[size // 2 :] *= 100
                        if size > 1000:
                            values[100:400] = 0
                            values[500:600] = -1e-39  # denormal in fp32, beside one that is not
                            values[600] = 1
                        codec = Quantized(kind, group, rounding, rotate=rotate)
                        assert compare(codec, values.to(sys.argv[1])), (codec.name, dtype, size)
                        count += 1
print(count)
"""

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed; it comes with torch's CUDA builds"
)


KINDS = ("int8", "int4", "int2")
CASES_OF_A_KIND = 2 * 2 * 3 * 3 * 3


def compare(device: str, *kinds: str, **environment: str) -> int:
    """How many cases have been compared, all equal."""
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, device, *kinds],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_equal_torch() -> None:
    assert compare("cpu", *KINDS, TRITON_INTERPRET="1") == len(KINDS) * CASES_OF_A_KIND


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_compiled_kernels_equal_torch() -> None:
    # Some 500 compilations, a third of a second each: a process for each kind.
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda kind: compare("cuda", kind), KINDS)) == [CASES_OF_A_KIND] * len(KINDS)


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
        [sys.executable, "-c", f"{code}; print('triton' in sys.modules, 'compact._triton' in sys.modules)"],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == "False"
    assert Quantized("int8").packed_nbytes(Spec.of(torch.ones(64))) == 68
