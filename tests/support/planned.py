"""A small model of alike blocks and its training, plain or offloaded by plan, for tests of tier auto."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tba import Offloader, attach, offload_context
from tba._plan.greedy import decide
from tba._plan.no_plan import NoPlan
from tba._plan.plan import Plan

MIB = 1 << 20
ROWS, WIDTH, LAYERS = 512, 128, 6
BLOCK_BYTES = ROWS * WIDTH * 4 * 10  # about, of one block
SLOW = {"max_write_rate": "30MB", "max_read_rate": "30MB"}


class Block(nn.Module):
    """One residual block: what it saves, besides its input, is four times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        inner = self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))
        return x + (inner if scale is None else inner * scale)


class Edited(Block):
    """Edits, if it is told to, a tensor that its GELU has given, where PyTorch does not see it."""

    edits = False

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        wide = nn.functional.gelu(self.up(self.norm(x)))
        if self.edits:
            wide.data.neg_()
        return x + self.down(wide)


class Gated(Block):
    """Ends with an activation, which the next block saves: the one's own saved tensor gives it again."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return nn.functional.silu(x + self.down(nn.functional.gelu(self.up(x))))


class Net(nn.Module):
    """A stack of blocks."""

    def __init__(self, block: Callable[[], nn.Module] = Block, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, **kwargs)
        return self.head(x)


class Training:
    """One training from one seed, plain or offloaded, step by step."""

    def __init__(
        self, block: Callable[[], nn.Module] = Block, layers: int = LAYERS, device: torch.device | None = None
    ) -> None:
        torch.manual_seed(1)
        self._made_of = block, layers, device
        self.model = Net(block, layers).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def step(self, rows: int = ROWS, number: int = 0, **kwargs: Any) -> None:
        generator = torch.Generator().manual_seed(number)
        torch.manual_seed(100 + number)
        x = torch.randn(rows, WIDTH, generator=generator).to(self._made_of[2])
        self.model(x, **kwargs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def again(self) -> Training:
        """The same training from its beginning."""
        return Training(*self._made_of)

    def state(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.model.state_dict().values()]


def train(offload: Offloader | None, training: Training, steps: int = 6, **kwargs: Any) -> list[Tensor]:
    for number in range(steps):
        with offload if offload is not None else nothing():
            training.step(number=number, **kwargs)
    return training.state()


def follow(
    offload: Offloader, training: Training, steps: int = 6, *, first: int = 0, **kwargs: Any
) -> list[Plan | NoPlan]:
    """Train for some steps; the plan after each of them."""
    plans = []
    for number in range(first, first + steps):
        with offload:
            training.step(number=number, **kwargs)
        plans.append(offload.plan)
    return plans


def follow_as_plain(offload: Offloader, training: Training, steps: int = 6, **kwargs: Any) -> Plan:
    """Train from the beginning, to the last bit as plain PyTorch does; the last plan."""
    follow(offload, training, steps, **kwargs)
    assert_equal(training.state(), train(None, training.again(), steps, **kwargs))
    assert offload.plan
    return offload.plan


def departures(plans: Sequence[Plan | NoPlan]) -> int:
    """Steps that departed from their plan, of plans after each step: one that kept to it has measured it anew."""
    return sum(bool(before) and after is before for before, after in pairwise(plans))


@contextmanager
def nothing() -> Iterator[None]:
    yield


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(map(torch.equal, one, other))


def saved_bytes(block: Callable[[], nn.Module] = Block) -> int:
    """Bytes that a step of the plain training saves in storages of at least the minimum size."""
    with offload_context(None, "auto", min_tensor_bytes=4096) as offload:
        Training(block).step()
    stats = offload.stats()
    offload.close()
    return stats.saved_bytes - stats.weight_bytes - stats.duplicate_bytes


def only_deriving(patch: pytest.MonkeyPatch) -> None:
    """Have plans move and recompute nothing, so that what they do does not depend on what is fast here."""
    patch.setattr("tba._auto.planner.decide", partial(decide, moves=False, recomputes=False))


WAYS = ("attach", "around the step", "around the forward")


@contextmanager
def used(how: str, model: nn.Module, scratch: Path, **settings: Any) -> Iterator[Offloader]:
    """An engine of tier auto that moves whatever is saved, attached or not; closed at the end."""
    settings = {"storage_paths": scratch, "min_tensor_bytes": 0} | settings
    offload = (attach if how == "attach" else offload_context)(model, "auto", **settings)
    yield offload
    offload.close()


def step(
    how: str, offload: Offloader | None, model: nn.Module, rows: int, width: int, **arguments: Any
) -> list[Tensor]:
    """The gradients of one step of a model that returns its loss, with the context where `how` says: one of `WAYS`."""
    model.zero_grad()
    torch.manual_seed(rows)
    x = torch.randn(rows, width)
    with offload if offload is not None and how != "attach" else nullcontext():
        loss = model(x, **arguments)
        if how == "around the step":
            loss.backward()
    if how != "around the step":
        loss.backward()
    return gradients(model)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def records(offload: Offloader) -> int:
    """How many records the engine has made so far."""
    return offload._saver._packing.numbers
