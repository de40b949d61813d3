"""On a GPU: what a step may hold at most, derived term by term; what comes back when; and memory that cannot be had."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.engine import Gate, save
from support.exactness import assert_bit_equal
from support.gpu import DEVICE, MIB, SIMULATED, card, gpu_only, leaf_of, offloader, open_device

pytestmark = [*gpu_only, pytest.mark.serial]

LAYERS = 32
ELEMENTS = 2 * MIB
N = 4 * ELEMENTS  # bytes of one saved tensor
cuda_only = pytest.mark.skipif(SIMULATED, reason="only CUDA pins memory that it has not allocated")
both_tiers = pytest.mark.parametrize("tier", ["nvme", "cpu"])


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    open_device()


class Sine(torch.autograd.Function):
    """x -> sin(x). Saves its input; backward needs its gradient, one temporary and its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos()


def net(x: Tensor, layers: int = LAYERS) -> Tensor:
    for _ in range(layers):
        result = Sine.apply(x)
        assert isinstance(result, Tensor)
        x = result
    return x


def settled_bytes() -> int:
    """What tensors have asked for and not given back."""
    gc.collect()
    card.synchronize()
    torch.empty(1, device=DEVICE)  # only when asked does the allocator look whether other streams are done with a block
    nbytes: int = card.memory_stats(DEVICE)["requested_bytes.all.current"]
    return nbytes


class Peak:
    """The most bytes in use on the device inside the context, above what was in use at its start.

    "Active": allocated, or freed but not to be reused yet because another stream may still be using them.
    """

    nbytes = 0

    def __enter__(self) -> Peak:
        gc.collect()
        card.synchronize()
        card.empty_cache()  # a cached block of another size may be given out whole, and would count whole
        card.reset_peak_memory_stats(DEVICE)
        self._before = card.memory_stats(DEVICE)["active_bytes.all.current"]
        return self

    def __exit__(self, *error: object) -> None:
        card.synchronize()
        self.nbytes = card.memory_stats(DEVICE)["active_bytes.all.peak"] - self._before


def plain() -> tuple[int, Tensor]:
    leaf = leaf_of(elements=ELEMENTS)
    with Peak() as peak:
        net(leaf * 1).sum().backward()
    assert leaf.grad is not None
    return peak.nbytes, leaf.grad


@both_tiers
def test_the_peak_is_what_the_caps_and_one_layer_add_up_to(tier: str, scratch: Path) -> None:
    window, staging = 4 * N, 4 * N
    plain_peak, expected = plain()
    # Forward's end: the inputs of all layers are saved, and the last one's result is there.
    assert plain_peak >= (LAYERS + 1) * N
    with offloader(tier, scratch, prefetch_bytes=window, staging_bytes=staging) as offload:
        peaks = []
        for _ in range(3):
            leaf = leaf_of(elements=ELEMENTS)
            with Peak() as peak:
                with offload:
                    loss = net(leaf * 1).sum()
                loss.backward()
            peaks.append(peak.nbytes)
            assert_bit_equal(leaf.grad, expected)
        stats = offload.stats()
    forward = (
        window  # held back: the same bytes that read-ahead may take later
        + N  # one more, until it is on its way
        + staging  # on the way out
        + 2 * N  # the layer that is running: its input and its result
    )
    backward = (
        window  # read ahead, or still held
        + staging  # writes of forward that have not ended
        + 3 * N  # the layer that is running: gradient, temporary, result
        + N  # the leaf's gradient
        + N  # a tensor that is asked for while what was read ahead of it cannot be taken back
    )
    slack = MIB  # the loss, seeds, rounding of small blocks
    assert max(peaks) <= max(forward, backward) + slack, peaks
    assert plain_peak - max(peaks) >= (LAYERS + 1) * N - max(forward, backward) - slack
    assert stats.staging_peak_bytes <= staging
    assert stats.read_bytes >= 3 * (LAYERS * N - window - staging)


@both_tiers
def test_backward_running_ahead_of_the_device_needs_no_more_memory(tier: str, scratch: Path) -> None:
    """Launching is quick and the device is slow: restored memory is reused in the order of the stream, not of time."""

    class Slow(Sine):
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            card._sleep(10_000_000)  # five milliseconds a layer
            return Sine.backward(ctx, *gradients)

    window = 4 * N
    with offloader(tier, scratch, prefetch_bytes=window) as offload:
        leaf = leaf_of(elements=ELEMENTS)
        with offload:
            x = leaf * 1
            for _ in range(LAYERS):
                x = Slow.apply(x)
            loss = x.sum()
            del x
        offload.flush()
        with Peak() as peak:
            loss.backward()
    assert peak.nbytes <= window + 3 * N + N + N + MIB  # the terms of backward above, with no write left


@both_tiers
def test_memory_comes_back_with_the_copy_and_with_the_graph(tier: str, scratch: Path) -> None:
    before = settled_bytes()
    with offloader(tier, scratch) as offload:
        leaf = leaf_of(elements=ELEMENTS)
        with offload:
            y = net(leaf * 1, 8)
        assert settled_bytes() >= before + N + N
        offload.flush()
        assert settled_bytes() == before + 2 * N, "more than the leaf and the result is left"
        assert offload.stats().live_records == 8
        del y
        assert offload.stats().live_records == 0
        del leaf
        assert settled_bytes() == before


@both_tiers
def test_a_graph_dropped_while_its_copies_are_under_way_gives_everything_back(tier: str, scratch: Path) -> None:
    before = settled_bytes()
    gate = Gate("write")
    with offloader(tier, scratch, gate, prefetch_bytes=0) as offload:
        leaf = leaf_of(elements=ELEMENTS)
        with offload:
            y = net(leaf * 1, 4)
        del y
        opener = threading.Timer(0.2, gate.open)
        opener.start()
        offload.flush()
        opener.join()
        assert offload.stats().live_records == 0
        del leaf
        assert settled_bytes() == before


def test_a_thousand_small_steps_leave_the_device_as_it_was(scratch: Path) -> None:
    with offloader("nvme", scratch, prefetch_bytes=1 << 16) as offload:
        weight = torch.randn(64, device=DEVICE, requires_grad=True)
        sizes = []
        for number in range(1000):
            with offload:
                y = save(weight * 1).exp()
            y.sum().backward()
            if number % 100 == 99:
                del y
                sizes.append(settled_bytes())
        assert len(set(sizes[1:])) == 1, sizes
        assert offload.stats().live_records == 0


@cuda_only
def test_where_pinning_fails_copies_go_through_pageable_memory_with_one_warning(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = plain()

    def pin(address: int, nbytes: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("tba._device.pinning._pin", pin)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with offloader("nvme", scratch, prefetch_bytes=4 * N) as offload:
            leaf = leaf_of(elements=ELEMENTS)
            with offload:
                y = net(leaf * 1)
            offload.flush()
            y.sum().backward()
            stats = offload.stats()
    ours = [str(one.message) for one in seen if "pinning" in str(one.message)]
    assert len(ours) == 1, ours
    assert "pageable memory there, slower" in ours[0]
    assert_bit_equal(leaf.grad, expected)
    assert stats.read_bytes >= LAYERS * N
    assert stats.errors == 0


@cuda_only
def test_a_failure_to_pin_is_not_taken_for_that_of_the_next_kernel() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pinning = sys.modules["tba._device.pinning"]
    pinning._pin(address, mmap.PAGESIZE)
    with pytest.raises(RuntimeError, match="already mapped"):
        pinning._pin(address, mmap.PAGESIZE)
    assert torch.zeros(1, device=DEVICE).add_(1).item() == 1
    pinning._unpin(address)
    with pytest.raises(RuntimeError, match="not correspond to a registered"):
        pinning._unpin(address)
    assert torch.zeros(1, device=DEVICE).add_(1).item() == 1


def test_auto_offloads_what_the_device_has_no_memory_for(scratch: Path) -> None:
    """The host has plenty; it is the device's memory that decides."""
    _, expected = plain()
    settled_bytes()
    card.empty_cache()
    total = card.get_device_properties(DEVICE).total_memory
    allowed = card.memory_reserved(DEVICE) + (LAYERS // 2) * N
    card.set_per_process_memory_fraction(allowed / total, DEVICE)
    try:
        leaf = leaf_of(elements=ELEMENTS)
        with pytest.raises(torch.OutOfMemoryError):
            net(leaf * 1).sum().backward()
        gc.collect()
        card.empty_cache()
        leaf = leaf_of(elements=ELEMENTS)
        with offloader("auto", scratch, memory_budget=None, staging_bytes=2 * N, prefetch_bytes=2 * N) as offload:
            with offload:
                loss = net(leaf * 1).sum()
            loss.backward()
            assert offload.stats().written_bytes > 0
        assert_bit_equal(leaf.grad, expected)
    finally:
        card.set_per_process_memory_fraction(1.0, DEVICE)
