"""Late flags: a device says at any time whether a codec has packed a tensor, and gradients do not depend on when."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from io_backends import HostStore
from support.card import Card
from support.engine import ALL_INT8
from support.exactness import equal, gradients_of
from support.models import Mixed
from tba import OffloadConfig, Offloader


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def train(tier: str) -> list[Tensor]:
    torch.manual_seed(0)
    model, ids = Mixed(), torch.randint(0, 50, (4, 64))
    store = HostStore() if tier == "nvme" else None
    config = OffloadConfig(tier=tier, compress=ALL_INT8, min_tensor_bytes=0)
    gradients, stats = gradients_of(model, ids, Offloader(model, config, store=store), steps=2, flush=tier == "nvme")
    assert stats is not None
    assert stats.derived_bytes > 0
    assert stats.packed_bytes > 0
    return gradients


@pytest.mark.parametrize("tier", ["keep", "nvme"])
def test_what_a_lossy_preset_makes_does_not_depend_on_when_a_device_answers(card: Card, tier: str) -> None:
    """A tensor was derived or not, as its source had been packed by then or not."""
    at_once = train("keep")
    card.blocks()
    assert equal(train("keep"), at_once)  # until backward asks
    for seed in range(10):
        chance = random.Random(seed)
        card.is_over = lambda chance=chance: chance.random() < 0.3  # type: ignore[misc]
        assert equal(train(tier), at_once), seed
