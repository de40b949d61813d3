"""Joined: aliases of one storage share a record, at a cost that grows with their number, and not with its square."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.engine import activation, engine
from support.exactness import assert_bit_equal
from tba._record import source
from tba._record.source import Source

N = 256
BYTES = N * 4


class Looked(list[tuple[Tensor, int]]):
    """Counters of aliases, which count how often one of them is asked for its version."""

    looks = 0

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for each in super().__iter__():
            Looked.looks += 1
            yield each


@pytest.fixture(autouse=True)
def _looked(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Source.watch

    def watched(self: Source, counter: Tensor) -> None:
        watch(self, counter)
        if type(self.joined) is list:
            self.joined = Looked(self.joined)

    monkeypatch.setattr(Source, "watch", watched)
    Looked.looks = 0


def train(scratch: Path, aliases: list[Tensor]) -> tuple[Tensor, int, int]:
    """The gradient of the sum of each alias times a weight, the bytes handed to the tier, and the looks at counters."""
    Looked.looks = 0
    weight = torch.ones((), requires_grad=True)
    with engine(scratch) as offload:
        with offload:
            loss = torch.stack([(weight * alias).sum() for alias in aliases]).sum()
        loss.backward()
        assert weight.grad is not None
        return weight.grad, offload.stats().offloaded_bytes, Looked.looks


def plain(x: Tensor, count: int) -> Tensor:
    weight = torch.ones((), requires_grad=True)
    torch.stack([(weight * x.detach()).sum() for _ in range(count)]).sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_looks_grow_with_the_number_of_aliases(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_MOST_JOINED", 16)
    _, x = activation(N)
    looks = []
    for count in (200, 400):
        gradient, nbytes, looked = train(scratch, [x.detach() for _ in range(count)])
        assert_bit_equal(gradient, plain(x, count))
        assert nbytes == -(-count // 17) * BYTES  # the first, and those that have joined it
        looks.append(looked)
    assert 0 < looks[1] < 2.2 * looks[0]


def test_an_alias_that_is_saved_again_adds_no_counter(scratch: Path) -> None:
    _, x = activation(N)
    one, other = x.detach(), x.detach()
    _, nbytes, looks = train(scratch, [x.detach(), *[one, other] * 100])
    assert nbytes == BYTES
    assert looks <= 3 * 2 * 201  # in pack, and in unpack


def test_an_edit_of_an_alias_that_was_saved_twice_counts(scratch: Path) -> None:
    _, x = activation(N)
    alias = x.detach()
    weight = torch.ones((), requires_grad=True)
    with engine(scratch, prefetch_bytes="1MiB") as offload:
        with offload:
            losses = [(weight * each).sum() for each in (x.detach(), alias, alias)]
            alias.add_(1)
            after = (weight * alias).sum()
        after.backward()
        assert_bit_equal(weight.grad, (alias * 1).sum())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[1].backward()
