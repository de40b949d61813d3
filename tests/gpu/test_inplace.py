"""On a GPU: an in-place edit of a saved tensor is noticed while its copy is under way, and not by a write after it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.engine import Gate, save
from support.exactness import assert_bit_equal
from support.gpu import SIMULATED, card, gpu_only, leaf_of, offloader, open_device

pytestmark = gpu_only

MODIFIED = "modified by an inplace operation"
both_tiers = pytest.mark.parametrize("tier", ["nvme", "cpu"])


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    open_device()


def activation() -> tuple[Tensor, Tensor]:
    leaf = leaf_of()
    return leaf, leaf * 1


def test_an_edit_while_only_the_write_is_under_way_does_not_reach_it(scratch: Path) -> None:
    gate = Gate("write")
    with offloader("nvme", scratch, gate, prefetch_bytes=0) as offload:
        leaf, x = activation()
        with offload:
            y = save(x)
        card.synchronize()
        with offload._saver.lock:
            offload._saver.settle()  # as the next hook would
        with torch.no_grad():
            x.add_(1)
        y.sum().backward()
        assert_bit_equal(leaf.grad, 2 * leaf.detach())
        gate.open()


@both_tiers
def test_an_edit_while_the_copy_is_held_back_is_noticed(
    tier: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = sys.modules["tba._device.streams"]
    real = streams._side_stream

    def held_back(device: torch.device, direction: str) -> card.Stream:
        stream: card.Stream = real(device, direction)
        if SIMULATED:
            holding.enter_context(card.held(stream))
        else:
            with card.stream(stream):
                card._sleep(1_000_000_000)  # half a second
        return stream

    with offloader(tier, scratch, prefetch_bytes=0) as offload, ExitStack() as holding:
        with offload:  # opens the file, and makes the streams and pinned memory
            save(activation()[1])
        offload.flush()
        _, x = activation()
        with monkeypatch.context() as patched, offload:
            patched.setattr(streams, "_side_stream", held_back)
            y = save(x)
        with torch.no_grad():  # leaving the context has queued the copy, behind what holds it back
            x.add_(1)
        holding.close()
        offload.flush()
        with pytest.raises(RuntimeError, match=MODIFIED):
            y.sum().backward()
