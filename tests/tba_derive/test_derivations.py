"""Derivations: comparisons that a device makes are not waited for, but in forward where they are far behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support.engine import activation, engine
from support.exactness import equal
from tba._derive import derivations

TOKENS, WIDTH, LAYERS = 32, 64, 12
NBYTES = TOKENS * WIDTH * 4


class Device:
    """Outcomes of comparisons arrive one by one while more than `behind` are under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way = 0
        self.most = 0
        self.ended = 0
        self.behind = 8
        differs = derivations._differs
        monkeypatch.setattr(derivations, "_differs", lambda *pair: torch.tensor(differs(*pair)))
        monkeypatch.setattr(derivations.streams, "fetch", self.fetch)

    def fetch(self, flag: Tensor) -> tuple[Tensor, SimpleNamespace]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return flag, SimpleNamespace(query=lambda: self.under_way > self.behind, synchronize=self.end)

    def end(self) -> None:
        assert self.under_way > self.behind, "it is waited for"
        self.under_way -= 1
        self.ended += 1


def loss_of(layers: int, most: float = 1e9) -> tuple[Tensor, Tensor]:
    """(leaf, loss): each layer saves silu's input, which is stored, and a product, which follows from it."""
    leaf, x = activation(TOKENS, WIDTH)
    weight = torch.eye(WIDTH).requires_grad_()
    for _ in range(layers):
        h = functional.silu(x) * 2.0
        h.data.clamp_(max=most)
        x = functional.linear(h, weight) * 1.5
    return leaf, x.square().sum()


@pytest.mark.parametrize("tier", ["keep", "nvme"])
def test_what_is_still_being_compared_is_let_go_of_later(
    tier: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf, loss = loss_of(3)
    wanted = torch.autograd.grad(loss, leaf)
    device = Device(monkeypatch)
    with engine(scratch, tier=tier, compress="exact") as offload:
        for step in range(2):
            with offload:
                leaf, loss = loss_of(3)
            assert device.under_way == device.most == 3
            assert offload.stats().derived_bytes == step * 3 * NBYTES
            device.behind = 0
            assert equal(list(torch.autograd.grad(loss, leaf)), list(wanted))
            assert offload.stats().derived_bytes == (step + 1) * 3 * NBYTES
            device.behind = 8
        del loss
        assert offload.stats().live_records == 0


def test_comparisons_too_far_behind_are_waited_for(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    with engine(scratch, tier="keep", compress="exact") as offload:
        with offload:
            _, loss = loss_of(LAYERS)
        assert (device.most, device.ended) == (9, LAYERS - 8)
        assert offload.stats().derived_bytes == (LAYERS - 8) * NBYTES
        del loss


def test_what_a_device_finds_to_differ_is_stored(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaf, loss = loss_of(3, most=0.5)
    wanted = torch.autograd.grad(loss, leaf)
    device = Device(monkeypatch)
    device.behind = 0
    with engine(scratch, compress="exact") as offload:
        for _ in range(2):
            with offload:
                leaf, loss = loss_of(3, most=0.5)
            assert equal(list(torch.autograd.grad(loss, leaf)), list(wanted))
        assert offload.stats().derived_bytes == 0
        assert device.ended == 3  # the first step's: what has come out wrong is not tried again
