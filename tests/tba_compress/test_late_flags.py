"""Late flags: a device says at any time whether a codec has packed a tensor, and gradients do not depend on when."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from io_backends import HostStore
from support.card import Card, Flag
from support.engine import ALL_INT8, engine, lock_of, parts_of
from support.exactness import equal, gradients_of
from support.models import Mixed
from tba import OffloadConfig, Offloader
from tba._derive import derivations as module


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


def derivable(x: Tensor, layers: int) -> Tensor:
    """Saves two tensors a layer, of which others give one again."""
    for _ in range(layers):
        x = torch.nn.functional.gelu(torch.nn.functional.silu(x * 1.0) * 2.0)
    return x.sum()


@pytest.fixture
def strict(card: Card, monkeypatch: pytest.MonkeyPatch) -> Card:
    """A card of whose flags nobody may wait before they are there."""

    def synchronize(flag: Flag) -> None:
        assert flag.query(), "a hook waits for the device with the engine's lock held"

    monkeypatch.setattr(Flag, "synchronize", synchronize)
    differs = module._differs
    monkeypatch.setattr(module, "_differs", lambda *pair: torch.tensor(differs(*pair)))  # as a device gives it
    return card


def test_forward_waits_for_comparisons_with_the_lock_free(strict: Card, scratch: Path) -> None:
    leaf = torch.randn(64, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(derivable(leaf, 20), leaf)
    strict.blocks()
    losses = []
    with engine(scratch, compress="exact") as offload:
        derivations = parts_of(offload).derivations
        assert derivations is not None

        def forward() -> None:
            with offload:
                losses.append(derivable(leaf, 20))

        thread = threading.Thread(target=forward)
        thread.start()
        while not derivations.crowded and thread.is_alive():
            time.sleep(0.001)
        for _ in range(10):  # between two looks at the device, each time
            assert lock_of(offload).acquire(timeout=60)
            most = len(derivations.waiting)
            lock_of(offload).release()
            time.sleep(0.001)
        assert most == 9
        assert thread.is_alive()
        strict.goes_on()
        thread.join()
        assert offload.stats().derived_bytes > 8 * leaf.nbytes
        losses.pop().backward()
    assert equal([leaf.grad], [expected])


def test_backward_waits_for_no_comparison_of_an_exact_preset(strict: Card, scratch: Path) -> None:
    leaf = torch.randn(64, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(derivable(leaf, 6), leaf)
    strict.blocks()
    with engine(scratch, compress="exact") as offload:
        with offload:
            loss = derivable(leaf, 6)
        loss.backward()
        assert equal([leaf.grad], [expected])
        strict.goes_on()
        leaf.grad = None
        with offload:
            loss = derivable(leaf, 6)
        loss.backward()
        assert equal([leaf.grad], [expected])
        assert offload.stats().derived_bytes > 0
        del loss
        assert offload.stats().live_records == 0


def test_derivations_that_take_a_device_too_long_are_given_up(
    strict: Card, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tba._transfer.cost.Cost.per_byte_s", 1e-9)  # of what moves
    derived = [0]
    with engine(scratch, compress="exact") as offload:
        for _ in range(8):
            leaf = torch.randn(64, 64, requires_grad=True)
            with offload:
                loss = derivable(leaf, 6)
            offload.flush()
            loss.backward()
            derived.append(offload.stats().derived_bytes)
        assert derived[1] > 0
        assert derived[-1] == derived[-2], "what the device took was not noted"
