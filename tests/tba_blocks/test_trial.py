"""What a trial finds out about blocks that must not recompute, and that it leaves nothing behind."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from support.models import Made
from tba._blocks.trial import Trial, Verdict
from tba._plan import clock

KEPT = SimpleNamespace(numbers=np.random)  # no code that uses it by that name says what it is


class Layer(nn.Module):
    """Does to its weight and what it is given what it is told to."""

    def __init__(self, what: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), nn.Buffer(torch.zeros(1))
        self.what, self.memory = what, [0]

    def forward(self, x: Tensor, by: Any = 1.0) -> Tensor:
        with torch.no_grad():
            found = self.what(self, x)
        out = self.linear(x)
        return out * (found if isinstance(found, (int, Tensor)) else 1.0)


def _remembers(layer: Layer, _: Tensor) -> int:
    layer.memory[0] += 1
    return layer.memory[0]


def _trial(block: nn.Module) -> Trial:
    return Trial(block, block.forward, Tensor.detach, lambda kept: kept, nullcontext)


@pytest.mark.parametrize(
    ("what", "why_not"),
    [
        (lambda *_: None, ""),
        (lambda _, x: torch.nn.functional.dropout(x, 0.5), ""),
        (lambda layer, _: layer.calls.add_(1), "it changes calls"),
        (lambda layer, _: layer.linear.weight.mul_(2).sum(), "it changes its weights"),
        (lambda layer, _: layer.linear.weight.data.mul_(2).sum(), "it changes its weights"),
        (lambda _, x: x.zero_(), "it changes what it is given"),
        (_remembers, "it changes memory"),
        (lambda *_: KEPT.numbers.rand(), "it changes NumPy's random numbers"),
    ],
)
def test_verdicts(what: Callable[[Any, Tensor], Any], why_not: str) -> None:
    torch.manual_seed(0)
    layer, x = Layer(what), torch.ones(3, 4, requires_grad=True) * 1.0
    trial = _trial(layer)
    out = trial.call((x,), {})
    before = [tensor.clone() for tensor in layer.state_dict().values()]
    out.sum().backward()
    assert trial.verdict is not None
    assert trial.verdict.why_not == why_not
    assert (trial.verdict.seconds is not None) == (not why_not)
    assert all(map(torch.equal, before, layer.state_dict().values()))


def test_seconds_end_with_the_last_tensor_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch ends a recomputation there: what a block computes with what it saved last is not computed again."""
    times_s = iter([0.0, 1.0, *[11.0] * 9])
    monkeypatch.setattr(clock.current, "now_s", lambda: next(times_s))

    trial = _trial(Made(lambda _, x: x.exp() + 1.0))
    trial.call((torch.ones(3, 4, requires_grad=True) * 1.0,), {}).sum().backward()
    assert trial.verdict == Verdict(1.0)


@pytest.mark.parametrize("goes_back", [False, True], ids=["", "goes through its own graph"])
def test_a_second_run_keeps_what_it_saves_only_where_its_forward_asks_for_it(goes_back: bool) -> None:
    told, tell = os.pipe()  # which no trial takes for state of the block

    def forward(_: nn.Module, x: Tensor) -> Tensor:
        saved = x.exp()
        memory, out = StorageWeakRef(saved.untyped_storage()), saved.sin()
        del saved
        os.write(tell, b"gone" if memory.expired() else b"kept")
        return torch.autograd.grad(out.sum(), x, create_graph=True)[0] if goes_back else out

    trial, x = _trial(Made(forward)), torch.ones(3, 4, requires_grad=True) * 1.0
    trial.call((x,), {}).sum().backward()
    assert trial.verdict is not None
    assert trial.verdict.why_not == ""
    assert os.read(told, 99) == (b"keptgonekept" if goes_back else b"keptgone")
    os.close(told)
    os.close(tell)


def test_an_argument_whose_state_cannot_be_read_is_named() -> None:
    trial = _trial(Layer(lambda *_: None))
    trial.call((torch.ones(3, 4, requires_grad=True),), {"by": itertools.count()})
    assert trial.verdict == Verdict(None, "it holds a count, whose state nobody can compare")


_OFFSETS = torch.tensor([0, 1, 3])
_NOT_COMPARED = "it returns a sparse or nested tensor, which is not compared"


@pytest.mark.parametrize(
    ("make", "why_not"),
    [
        (Tensor.to_sparse, _NOT_COMPARED),
        (lambda x: torch.nested.as_nested_tensor([x, x]), _NOT_COMPARED),
        (lambda x: torch.nested.nested_tensor_from_jagged(x, _OFFSETS), ""),
        # Its lengths belong to offsets that each run makes anew.
        (lambda x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged), "its second run gives other values"),
    ],
    ids=["sparse", "strided", "jagged", "jagged anew"],
)
def test_a_result_without_plain_memory_is_compared_only_if_jagged(
    make: Callable[[Tensor], Tensor], why_not: str
) -> None:
    class Two(Layer):
        def forward(self, x: Tensor, by: Any = 1.0) -> Any:
            return make(x * 1.0), super().forward(x, by)

    trial = _trial(Two(lambda *_: None))
    trial.call((torch.ones(3, 4, requires_grad=True),), {})[1].sum().backward()
    assert trial.verdict is not None
    assert trial.verdict.why_not == why_not


def test_a_block_is_tried_when_backward_reaches_what_it_made_and_not_what_it_was_given() -> None:
    block, known = Made(lambda self, x, bias: (self.linear(x) + bias, bias), linear=nn.Linear(4, 4)), list[bool]()
    trial = _trial(block)
    x, bias = torch.ones(3, 4), torch.ones(4, requires_grad=True) * 1.0
    bias.register_hook(lambda _: known.append(trial.verdict is not None))
    made, given = trial.call((x, bias), {})
    (made.sum() + given.sum()).backward()
    assert trial.verdict is not None
    assert not trial.verdict.why_not
    assert known == [True]
