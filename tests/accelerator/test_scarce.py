"""Scarce memory of a device: what the engine leaves to operators, and what it does before an error is raised."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from support import accelerator
from support.engine import chain, chain_gradient
from support.exactness import assert_bit_equal
from support.gpu import DEVICE, MIB, card, gpu_only, leaf_of, offloader
from tba._device import streams

pytestmark = gpu_only

ELEMENTS = MIB // 2
N = 4 * ELEMENTS  # bytes of one saved tensor
WIDE_BYTES = 48 * N


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """Leaves so many bytes of the device's memory to what is allocated from now on."""

    def limit(nbytes: int) -> None:
        gc.collect()
        card.synchronize()
        card.empty_cache()
        accelerator.configure(limit_bytes=card.memory_reserved(DEVICE) + nbytes)

    yield limit
    accelerator.configure()


def filled(leave: int) -> list[Tensor]:
    """Take all memory of the device that tensors of this size could have, except for so many."""
    found = card.memory_stats(DEVICE)
    unused_bytes = found["reserved_bytes.large_pool.current"] - found["active_bytes.large_pool.current"]
    count = card.mem_get_info(DEVICE)[0] // (20 * MIB) * (20 * MIB // N) + unused_bytes // N  # whole segments
    return [torch.empty(N, dtype=torch.uint8, device=DEVICE) for _ in range(count - leave)]


class Wide(torch.autograd.Function):
    """x -> 2 x. Its backward needs a lot of memory for a moment."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        torch.empty(WIDE_BYTES, dtype=torch.uint8, device=DEVICE)
        return gradients[0] * 2


def test_what_operators_took_once_is_left_to_them(limited: Callable[[int], None], scratch: Path) -> None:
    limited(128 * N)  # of which a sixteenth is far less than they take
    settings: dict[str, Any] = {"memory_budget": None, "staging_bytes": 2 * N, "prefetch_bytes": 2 * N}
    with offloader("auto", scratch, **settings) as offload:
        for layers in (8, 120):
            leaf = leaf_of(elements=ELEMENTS)
            with offload:
                loss = Wide.apply(chain(leaf * 1, layers)).sum()  # type: ignore[no-untyped-call]
            loss.backward()
            if layers == 8:
                assert offload.stats().written_bytes == 0
        assert 20 * N < offload.stats().written_bytes < 80 * N
    assert leaf.grad is not None


def test_a_lack_waits_for_what_is_on_its_way_out(limited: Callable[[int], None], scratch: Path) -> None:
    expected = chain_gradient(leaf_of(elements=ELEMENTS), 4)
    limited(20 * N)
    with offloader("cpu", scratch, prefetch_bytes=0, staging_bytes=64 * N) as offload, ExitStack() as stack:
        leaf = leaf_of(elements=ELEMENTS)
        with offload:
            early = chain(leaf * 1, 4).sum()
        offload.flush()
        card.empty_cache()
        stack.enter_context(card.held(streams._side_stream(DEVICE, "out")))
        with offload:
            later = chain(leaf_of(1, ELEMENTS) * 1, 8).sum()
        kept = filled(0)
        let_go = threading.Timer(0.3, stack.close)
        let_go.start()
        early.backward()
        let_go.join()
        assert_bit_equal(leaf.grad, expected)
        del kept, later


class Counts(torch.autograd.Function):
    """x -> x + 1. Its backward needs next to no memory, and tells what was saved."""

    sums: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(0.005)  # what is read from a file is there when the next is asked for
        Counts.sums.append(ctx.saved_tensors[0].sum())
        return gradients[0]


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_lack_of_memory_to_read_ahead_is_not_met_at_every_tensor(
    tier: str, limited: Callable[[int], None], scratch: Path
) -> None:
    layers = 40
    limited(64 * N)
    with offloader(tier, scratch, prefetch_bytes=16 * N, staging_bytes=4 * N) as offload:
        leaf = torch.zeros(ELEMENTS, device=DEVICE, requires_grad=True)
        with offload:
            y = leaf * 1
            for _ in range(layers):
                y = Counts.apply(y)  # type: ignore[no-untyped-call]
        offload.flush()
        y.sum()
        gradient = torch.ones(ELEMENTS, device=DEVICE)
        kept = filled(6)
        before = card.memory_stats(DEVICE)["num_ooms"]
        Counts.sums.clear()
        y.backward(gradient)
        assert [float(each) for each in Counts.sums] == [float(number * ELEMENTS) for number in reversed(range(layers))]
        assert 0 < card.memory_stats(DEVICE)["num_ooms"] - before < layers // 4
        del kept
