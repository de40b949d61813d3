"""What a trial finds out about blocks that must not recompute, and that it leaves nothing behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tba._blocks import trial as trial_module
from tba._blocks.trial import Trial, Verdict


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


@contextmanager
def _apart() -> Iterator[None]:
    yield


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
    ],
)
def test_verdicts(what: Callable[[Any, Tensor], Any], why_not: str) -> None:
    torch.manual_seed(0)
    layer, verdicts = Layer(what), list[Verdict]()
    x = torch.ones(3, 4, requires_grad=True) * 1.0
    trial = Trial(layer, layer.forward, lambda tensor: tensor.detach(), lambda kept: kept, _apart, verdicts.append)
    out = trial.call((x,), {})
    before = [tensor.clone() for tensor in layer.state_dict().values()]
    out.sum().backward()
    assert [verdict.why_not for verdict in verdicts] == [why_not]
    assert (verdicts[0].seconds is not None) == (not why_not)
    assert all(map(torch.equal, before, layer.state_dict().values()))


def test_seconds_end_with_the_last_tensor_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch ends a recomputation there: what a block computes with what it saved last is not computed again."""
    times_s = iter([0.0, 1.0, *[11.0] * 9])
    monkeypatch.setattr(trial_module.clock.current, "now_s", lambda: next(times_s))

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() + 1.0

    layer, verdicts = Slow(), list[Verdict]()
    trial = Trial(layer, layer.forward, lambda tensor: tensor.detach(), lambda kept: kept, _apart, verdicts.append)
    trial.call((torch.ones(3, 4, requires_grad=True) * 1.0,), {}).sum().backward()
    assert verdicts == [Verdict(1.0)]


def test_an_argument_whose_state_cannot_be_read_is_named() -> None:
    layer, verdicts = Layer(lambda *_: None), list[Verdict]()
    trial = Trial(layer, layer.forward, lambda tensor: tensor.detach(), lambda kept: kept, _apart, verdicts.append)
    trial.call((torch.ones(3, 4, requires_grad=True),), {"by": itertools.count()})
    assert [verdict.why_not for verdict in verdicts] == ["it holds a count, whose state nobody can compare"]


@pytest.mark.parametrize(
    "make", [Tensor.to_sparse, lambda x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged)]
)
def test_a_result_without_plain_memory_is_not_compared(make: Callable[[Tensor], Tensor]) -> None:
    class Two(Layer):
        def forward(self, x: Tensor, by: Any = 1.0) -> Any:
            return make(x * 1.0), super().forward(x, by)

    layer, verdicts = Two(lambda *_: None), list[Verdict]()
    trial = Trial(layer, layer.forward, lambda tensor: tensor.detach(), lambda kept: kept, _apart, verdicts.append)
    trial.call((torch.ones(3, 4, requires_grad=True),), {})[1].sum().backward()
    assert [verdict.why_not for verdict in verdicts] == ["it returns a sparse or nested tensor, which is not compared"]


def test_a_block_is_tried_when_backward_reaches_what_it_made_and_not_what_it_was_given() -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x) + bias, bias

    block, verdicts, known = Passes(), list[Verdict](), list[int]()
    x, bias = torch.ones(3, 4), torch.ones(4, requires_grad=True) * 1.0
    bias.register_hook(lambda _: known.append(len(verdicts)))
    trial = Trial(block, block.forward, lambda tensor: tensor.detach(), lambda kept: kept, _apart, verdicts.append)
    made, given = trial.call((x, bias), {})
    (made.sum() + given.sum()).backward()
    assert [verdict.why_not for verdict in verdicts] == [""]
    assert known == [1]
