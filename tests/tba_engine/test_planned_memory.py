"""What a plan predicts that saved tensors hold is what they hold, byte by byte, where transfers take no time."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn

from benchmarks._workload.instant_store import InstantStore
from io_backends import Buffer, Location, Store, Ticket
from support.clock import Counted
from support.planned import ROWS, WIDTH, Block, Training, follow, saved_bytes
from tba import OffloadConfig, Offloader
from tba._plan import clock

HEADS = 4


class Attending(nn.Module):
    """A block whose operators save several tensors at once, and tensors that others have saved."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        q, k, v = (part.clone() for part in self.qkv(x).view(4, -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4))
        weights = self.drop((q @ k.transpose(-1, -2)).softmax(-1))
        mixed: Tensor = self.out((weights @ v).transpose(1, 2).reshape(ROWS, WIDTH))
        return x + mixed * x.sigmoid()


class Keeping(InstantStore):
    """An `InstantStore` that gives back what was written: what is derived from that is compared."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []

    def submit_write(self, buffer: Buffer, on_done: Any, before: Any) -> Ticket:
        ticket = super().submit_write(buffer, on_done, before)
        assert ticket.location is not None
        ticket.location = ticket.location._replace(offset=len(self._kept))
        self._kept.append(ctypes.string_at(buffer.address, buffer.nbytes))
        return ticket

    def submit_read(self, location: Location, buffer: Buffer, on_done: Any, before: Any) -> Ticket:
        ctypes.memmove(buffer.address, self._kept[location.offset], buffer.nbytes)
        return super().submit_read(location, buffer, on_done, before)


@pytest.fixture(autouse=True)
def _a_link_that_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "current", Counted(rate=1 << 50))


@contextmanager
def planned(
    block: type[nn.Module], share: float, store: Store | None = None, **settings: Any
) -> Iterator[tuple[Training, Offloader]]:
    """A training whose saved tensors may hold this share of what a step saves, with a link that takes no time."""
    training = Training(block)
    config = OffloadConfig(
        tier="auto", min_tensor_bytes=4096, memory_budget=int(share * saved_bytes(block)), **settings
    )
    offload = Offloader(training.model, config, store=store or Keeping())
    try:
        yield training, offload
    finally:
        offload.close()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("share", [0.15, 0.25, 0.4, 0.55, 0.7, 0.85])
@pytest.mark.parametrize("block", [Block, Attending])
def test_a_peak_is_the_predicted_one(block: type[nn.Module], share: float) -> None:
    with planned(block, share) as (training, offload):
        compared = stood = 0
        for number in range(14):
            expected = offload.plan
            (plan,) = follow(offload, training, 1, first=number)
            if not expected or not plan or plan.measured is None:
                continue
            if not plan.decides_as(expected):  # it takes the place of the one that was carried out
                stood = 0
                continue
            # Its first step reads in the order of the watched one, in which trials have asked too; the second, in which
            # only what moves has records, has to learn that order.
            stood += 1
            assert plan.measured.peak_bytes <= expected.budget_bytes
            if stood > 2:
                compared += 1
                assert plan.measured.peak_bytes == expected.predicted.held_bytes
        assert compared


def test_a_plan_made_anew_says_at_which_step_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "current", Counted(rate=1 << 24))
    # What is derived, or recomputed, does not wait for the link: blocks whose bytes are lost do not recompute.
    with planned(Block, 0.5, InstantStore(), derive=False) as (training, offload):
        said = []
        for number in range(8):
            if number == 5:
                monkeypatch.setattr(clock, "current", Counted(rate=1 << 30))
            with offload:
                training.step(number=number)
            said.append(str(offload.plan).splitlines()[-1] if offload.plan else "")
    assert not any(line.startswith("planned anew") for line in said[:5])
    assert said[5:] == ["planned anew at step 6: the link carries 32 times what it did"] * 3


def test_a_run_that_fits_moves_nothing_and_is_not_planned() -> None:
    with planned(Block, 1.1) as (training, offload):
        assert not any(follow(offload, training, 4))
        stats = offload.stats()
        assert (stats.offloaded_bytes, stats.written_bytes, stats.read_bytes, stats.file_bytes) == (0, 0, 0, 0)
        assert stats.staging_peak_bytes == 0
        assert stats.kept_bytes > 0
