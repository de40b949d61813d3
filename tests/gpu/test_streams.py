"""On a GPU: whatever is late and on whatever stream, every byte is right; and no hook stops the whole device."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.exactness import assert_bit_equal
from support.gpu import (
    DEVICE,
    NBYTES,
    Delays,
    card,
    crossing_net,
    gpu_only,
    late_net,
    leaf_of,
    no_sleep,
    offloader,
    open_device,
)
from tba import Offloader, OffloadWarning

pytestmark = gpu_only

LAYERS = 10
CAPS = {"no read-ahead": 0, "a little": 3 * NBYTES, "all": 1 << 30}
both_tiers = pytest.mark.parametrize("tier", ["nvme", "cpu"])


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    open_device()


def plain_gradient(net: Callable[[Tensor], Tensor], seed: int = 0) -> Tensor:
    leaf = leaf_of(seed)
    net(leaf * 1).sum().backward()
    card.synchronize()
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())
    return leaf.grad


@both_tiers
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_exact_with_random_delays(
    seed: int, cap: str, tier: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_gradient(lambda x: late_net(x, LAYERS))
    delays = Delays(seed, monkeypatch)
    settings = {"prefetch_bytes": CAPS[cap], "staging_bytes": 4 * NBYTES}
    with offloader(tier, scratch, delays.plan, **settings) as offload:
        for flushed in (False, True, False):  # the third along an order learned twice
            leaf = leaf_of()
            with offload:
                y = late_net(leaf * 1, LAYERS, delays.sleep)
            if flushed:
                offload.flush()
            y.sum().backward()
            assert_bit_equal(leaf.grad, expected)
        stats = offload.stats()
    assert delays.copies > 2 * LAYERS
    assert stats.read_bytes >= 2 * LAYERS * NBYTES
    assert stats.errors == 0


@both_tiers
def test_forward_and_backward_each_on_a_stream_of_its_own(
    tier: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_gradient(lambda x: late_net(x, LAYERS))
    delays = Delays(1, monkeypatch)
    first, second, usual = card.Stream(), card.Stream(), card.current_stream()
    with offloader(tier, scratch, prefetch_bytes=3 * NBYTES) as offload:
        for _ in range(3):
            leaf = leaf_of()
            first.wait_stream(usual)
            with card.stream(first), offload:
                y = late_net(leaf * 1, LAYERS, delays.sleep)
            offload.flush()
            second.wait_stream(first)
            with card.stream(second):
                y.sum().backward()
            usual.wait_stream(second)
            assert_bit_equal(leaf.grad, expected)
        assert offload.stats().read_bytes >= 3 * 2 * LAYERS * NBYTES


@both_tiers
def test_one_tensor_saved_on_two_streams_serves_both(tier: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = card.Stream()
    expected = plain_gradient(lambda x: crossing_net(x, LAYERS, stream))
    delays = Delays(3, monkeypatch)
    with offloader(tier, scratch, prefetch_bytes=3 * NBYTES, staging_bytes=4 * NBYTES) as offload:
        for _ in range(2):
            leaf = leaf_of()
            with offload:
                y = crossing_net(leaf * 1, LAYERS, stream, delays.sleep)
            offload.flush()
            y.sum().backward()
            assert_bit_equal(leaf.grad, expected)
        assert offload.stats().duplicate_bytes == 2 * LAYERS * NBYTES


def test_backwards_of_several_threads_do_not_disturb_one_another(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_gradient(lambda x: late_net(x, LAYERS))
    delays = Delays(6, monkeypatch)
    gradients: list[Tensor | None] = [None] * 3
    with offloader("nvme", scratch, prefetch_bytes=3 * NBYTES) as offload:
        ready = card.Event()

        def step(index: int) -> None:
            stream = card.Stream(DEVICE)
            with card.stream(stream):
                stream.wait_event(ready)
                leaf = leaf_of()
                with offload:
                    y = late_net(leaf * 1, LAYERS, delays.sleep)
                y.sum().backward()
                stream.synchronize()
            gradients[index] = leaf.grad

        ready.record()
        threads = [threading.Thread(target=step, args=(index,)) for index in range(len(gradients))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    for gradient in gradients:
        assert_bit_equal(gradient, expected)


# -- what the hooks may not do -----------------------------------------------------------------------------------------


@both_tiers
def test_no_hook_waits_for_the_device(tier: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a hook synchronises")

    real = card.Event.synchronize

    def on_workers_only(event: card.Event) -> None:
        assert threading.current_thread().name.startswith("tba-"), "a hook waits for an event"
        real(event)

    expected = plain_gradient(lambda x: late_net(x, LAYERS))
    with offloader(tier, scratch, prefetch_bytes=3 * NBYTES) as offload:
        leaf = leaf_of()
        for number in range(2):
            with monkeypatch.context() as patched:  # `close` may wait
                if number:  # the first step makes streams, pinned memory and the file
                    patched.setattr(card, "synchronize", forbidden)
                    patched.setattr(card.Stream, "synchronize", forbidden)
                    patched.setattr(card.Event, "synchronize", on_workers_only)
                    card.set_sync_debug_mode("error")
                try:
                    leaf.grad = None
                    with offload:
                        y = late_net(leaf * 1, LAYERS)
                    y.sum().backward()
                finally:
                    card.set_sync_debug_mode("default")
        assert offload.stats().read_bytes > 0
    assert_bit_equal(leaf.grad, expected)


def test_capturing_a_cuda_graph_passes_through(scratch: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(DEVICE)
    x = torch.randn(32, 64, device=DEVICE)

    def step(offload: Offloader) -> None:
        with offload:
            loss = model(x).square().mean()
        loss.backward()

    with offloader("nvme", scratch, model=model) as offload:
        side = card.Stream()
        side.wait_stream(card.current_stream())
        with card.stream(side):
            for _ in range(3):  # as PyTorch asks for before a capture
                step(offload)
                model.zero_grad(set_to_none=True)
        card.current_stream().wait_stream(side)
        offload.flush()  # nothing is under way while a graph is recorded
        before = offload.stats()
        graph = card.CUDAGraph()
        with card.graph(graph):
            step(offload)
        after = offload.stats()
        assert before.offloaded_bytes > 0
        assert after.offloaded_bytes == before.offloaded_bytes
        assert after.kept_by_reason["CUDA graph capture"] > 0
        with torch.no_grad():
            x.copy_(torch.randn(32, 64))
        graph.replay()
        replayed = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        torch.testing.assert_close(replayed, list(expected))  # a captured matrix product may be another kernel
        step(offload)  # and afterwards the engine works again
        assert offload.stats().offloaded_bytes > after.offloaded_bytes


@both_tiers
def test_what_lies_in_the_memory_of_cuda_graphs_stays_with_one_warning(
    tier: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_gradient(lambda x: late_net(x, 4))
    monkeypatch.setattr("tba._engine.packing.in_graph_pool", lambda tensor: True)
    with offloader(tier, scratch) as offload, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            leaf = leaf_of()
            with offload:
                y = late_net(leaf * 1, 4)
            y.sum().backward()
            assert_bit_equal(leaf.grad, expected)
        stats = offload.stats()
    told = [str(each.message) for each in warned if each.category is OffloadWarning]
    assert sum("stay there (torch.compile with mode" in text for text in told) == 1, told
    assert stats.written_bytes == 0
    assert stats.kept_by_reason["memory of CUDA graphs"] == 2 * 4 * 2 * NBYTES


@pytest.mark.skipif(card.device_count() < 2, reason="needs two CUDA devices")
@both_tiers
def test_a_graph_over_two_devices_restores_to_both(tier: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def net(x: Tensor, sleep: Callable[[], None] = no_sleep) -> Tensor:
        for device in (1, 0, 1, 0):
            with card.device(device):
                x = late_net(x.to(f"{DEVICE.type}:{device}"), 3, sleep)
        return x

    expected = plain_gradient(net)
    delays = Delays(7, monkeypatch)
    with offloader(tier, scratch, prefetch_bytes=8 * NBYTES) as offload:
        for _ in range(3):
            leaf = leaf_of()
            with offload:
                y = net(leaf * 1, delays.sleep)
            offload.flush()
            y.sum().backward()
            assert_bit_equal(leaf.grad, expected)
