"""CuPy's arrays: to a disk by GPUDirect Storage or kvikio's own copies, and refused by stores of host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from io_backends import Buffer, KvikioStore, PosixStore, Store

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="CuPy is not installed: pip install cupy-cuda13x")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
WAIT_S = 60.0


@pytest.fixture
def store(scratch: Path) -> Any:
    pytest.importorskip("kvikio", reason="kvikio is not installed: pip install 'tba-offload[gds]'")
    store = KvikioStore(scratch)
    yield store
    store.close()


@pytest.mark.parametrize("elements", [1, 1000, 3 << 20])
def test_an_array_comes_back(store: Store, elements: int) -> None:
    source = cupy.random.default_rng(0).random(elements, dtype=cupy.float32)
    expected = source.copy()
    ticket = store.write(source, before=cupy.cuda.get_current_stream().synchronize)
    assert ticket.wait(WAIT_S)
    source[:] = 0
    target = cupy.empty_like(source)
    read = store.read(ticket.location, target, before=cupy.cuda.get_current_stream().synchronize)
    assert read.wait(WAIT_S)
    assert bool((target == expected).all())


def test_it_is_read_into_a_tensor_s_memory_and_the_reverse(store: Store) -> None:
    array = cupy.arange(100_000, dtype=cupy.float32)
    ticket = store.write(array, before=cupy.cuda.get_current_stream().synchronize)
    assert ticket.wait(WAIT_S)
    tensor = torch.zeros(100_000, device="cuda")
    torch.cuda.synchronize()
    assert store.read(ticket.location, tensor).wait(WAIT_S)
    assert torch.equal(tensor, torch.arange(100_000, dtype=torch.float32, device="cuda"))


def test_what_is_not_contiguous_is_refused() -> None:
    array = cupy.zeros((8, 8), dtype=cupy.float32)
    assert Buffer.of(array, writable=True) == Buffer(array.data.ptr, 256, array)
    with pytest.raises(ValueError, match="not contiguous"):
        Buffer.of(array.T[:4])


def test_a_store_of_host_memory_refuses_it(scratch: Path) -> None:
    store = PosixStore(scratch)
    with pytest.raises(ValueError, match="is memory of a CUDA device, and PosixStore moves host memory only"):
        store.write(cupy.zeros(10))
    store.close()
