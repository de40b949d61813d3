"""The engine over copies as a device makes them, on a CPU: through host memory of their own, late, or failing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from io_backends import Buffer, HostStore, PosixStore, Store
from support.engine import activation, chain, engine, save
from support.exactness import assert_bit_equal
from tba import OffloadConfig, Offloader, OffloadWarning

N = 64


class LateDeparture:
    """A copy that is made only when it is waited for."""

    def __init__(self, host: torch.Tensor, source: torch.Tensor) -> None:
        self._host = host
        self._source: torch.Tensor | None = source

    def __call__(self) -> None:
        assert self._source is not None
        self._host.copy_(self._source)
        self._source = None


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors leave as from a device: through host memory of their own, late. None of them outlives its copy."""
    sources: list[weakref.ref[torch.Tensor]] = []

    def out(source: torch.Tensor, begin: int, nbytes: int, *_: Any) -> tuple[Buffer, LateDeparture]:
        raw = torch.empty(0, dtype=torch.uint8)
        raw.set_(source.untyped_storage(), begin, (nbytes,), (1,))
        host = torch.empty(nbytes, dtype=torch.uint8)
        sources.append(weakref.ref(raw))
        return Buffer(host.data_ptr(), nbytes, host, given=True), LateDeparture(host, raw)

    monkeypatch.setattr("tba._device.streams.out", out)
    yield
    gc.collect()
    assert sources
    assert [source() for source in sources if source() is not None] == []


@pytest.fixture(params=["file", "host"])
def offload(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Offloader]:
    """Everything moves, to a file or into host memory."""
    store: Store = PosixStore(scratch, threads=1) if request.param == "file" else HostStore()
    offload = Offloader(None, OffloadConfig(tier="nvme", min_tensor_bytes=0, prefetch_bytes=1 << 16), store=store)
    yield offload
    offload.close()


def net(x: torch.Tensor) -> torch.Tensor:
    """Saves inputs, outputs, views, a mask and indices."""
    for _ in range(3):
        x = torch.relu(x.sin().t().exp()[1:-1].contiguous().t() * x[:, 2:])
        x = torch.where(x > x.mean(), x.sigmoid(), x[:, torch.arange(x.shape[1] - 1, -1, -1)])
    return x


def test_late_copies_are_exact(late: None, offload: Offloader) -> None:
    for step in range(3):
        plain = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
        leaf = plain.detach().clone().requires_grad_()
        net(plain * 1).sum().backward()
        with offload:
            y = net(leaf * 1)
        if step:
            offload.flush()
        y.sum().backward()
        assert_bit_equal(leaf.grad, plain.grad)
    stats = offload.stats()
    assert stats.read_bytes > 0
    assert stats.errors == stats.live_records == 0


def test_an_edit_before_a_late_copy_is_noticed(late: None, offload: Offloader) -> None:
    leaf, x = activation(N)
    with offload:
        y = save(x)
    with torch.no_grad():
        x.add_(1)
    offload.flush()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert leaf.grad is None


def test_an_edit_after_a_late_copy_does_not_reach_it(late: None, offload: Offloader) -> None:
    leaf, x = activation(N)
    with offload:
        y = save(x)
    offload.flush()
    with torch.no_grad():
        x.zero_()
    y.sum().backward()
    assert_bit_equal(leaf.grad, 2 * leaf.detach())


def test_memory_goes_with_a_late_copy_and_a_dropped_graph_leaves_nothing(late: None, offload: Offloader) -> None:
    _, x = activation(N)
    with offload:
        y = chain(x)
    gone = weakref.ref(x.untyped_storage())
    del x
    offload.flush()
    gc.collect()
    assert gone() is None
    assert offload.stats().live_records > 0
    del y
    assert offload.stats().live_records == 0


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("injected"), MemoryError("injected")], ids=["torch", "python"]
)
def test_where_no_host_memory_is_left_a_tensor_stays_where_it_is(
    error: Exception, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out(*_: object) -> None:
        raise error

    monkeypatch.setattr("tba._device.streams.out", out)
    with engine(scratch, prefetch_bytes=0) as offload:
        leaf, x = activation(N)
        with pytest.warns(OffloadWarning, match="could not be queued .*injected.*stay in memory"), offload:
            y = chain(x)
        y.sum().backward()
        assert leaf.grad is not None
        stats = offload.stats()
        assert stats.offloaded_bytes == stats.written_bytes == 0
        assert stats.kept_by_reason == {"write failed": stats.saved_bytes}
