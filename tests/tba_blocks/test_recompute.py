"""Recomputation of a block: what is let go of, made again and kept, and how often a block runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.models import CubedTwice, Made
from tba import OffloadError
from tba._blocks.recompute import recompute

KEPT: list[Tensor] = []


def _keep(tensor: Tensor) -> Tensor:
    KEPT.append(tensor)
    return tensor.detach()


def _give(kept: Tensor) -> Tensor:
    return kept


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    KEPT.clear()
    CALLS.clear()


class Layer(nn.Module):
    """Runs two linear layers, and counts its runs where no state of a program's is looked for."""

    def __init__(self, do: Callable[[Any], object] | None = None) -> None:
        super().__init__()
        self.up, self.down, self.do, self.kept = nn.Linear(4, 8), nn.Linear(8, 4), do, [0]

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.do is not None:
            self.do(self)
        RAN(x.detach())
        out = self.down(torch.nn.functional.gelu(self.up(x)))
        return x + (out if scale is None else out * scale)


CALLS: list[int] = []
_NAME = f"tba_test_{id(CALLS)}"  # this file may be imported more than once
torch.library.define(f"{_NAME}::ran", "(Tensor x) -> ()")
torch.library.impl(f"{_NAME}::ran", "CPU", lambda x: CALLS.append(1))
RAN = getattr(torch.ops, _NAME).ran  # an operator of PyTorch's, which keeps no state of a program's


def _runs() -> int:
    runs = len(CALLS)
    CALLS.clear()
    return runs


def _call(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = recompute(layer, layer.forward, args, kwargs, _keep, _give)[0]
    return out


def _gradients(layer: nn.Module) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
    layer.zero_grad()
    return found


def _plain(layer: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    layer(*args, **kwargs).square().sum().backward()
    _runs()
    return _gradients(layer)


def test_a_second_call_gives_what_it_finds_and_no_copy_of_it() -> None:
    """The sizes of a jagged tensor belong to the very tensor of its offsets."""
    found = torch.arange(4.0)
    out: Any = _call(Made(lambda _, x: x * found), torch.ones(3, 4, requires_grad=True))
    assert out.grad_fn._saved_other is found


def test_a_call_saves_what_it_is_given_and_runs_again_once() -> None:
    layer, x = Layer(), torch.randn(3, 4)
    expected = _plain(layer, x)
    out = _call(layer, x)
    assert [tuple(each.shape) for each in KEPT] == [(3, 4)]
    assert _runs() == 1
    out.square().sum().backward()
    assert _runs() == 1
    assert all(map(torch.equal, _gradients(layer), expected))


def test_what_a_call_saves_is_let_go_of_at_its_end() -> None:
    linear = {"first": nn.Linear(4, 4), "last": nn.Linear(4, 4)}
    layer, x = Made(lambda self, x: self.last(self.first(x).exp().exp()), **linear), torch.randn(3, 4)
    before = _living()
    out = _call(layer, x)
    assert _living() - before <= 3  # what it returns, its detached input, the state of the generator
    out.sum().backward()


def _living() -> int:
    gc.collect()
    return sum(isinstance(each, Tensor) for each in gc.get_objects())


@pytest.mark.parametrize(
    "do",
    [
        lambda layer: layer.kept.__setitem__(0, layer.kept[0] + 1),
        lambda layer: layer.up.weight.detach().add_(0.5),
        lambda layer: setattr(layer, "number", getattr(layer, "number", 0) + 1),
    ],
    ids=["a list", "a weight", "an attribute"],
)
def test_a_call_that_changes_something_is_not_repeated(do: Callable[[Any], object]) -> None:
    torch.manual_seed(0)
    layer, x = Layer(do), torch.randn(3, 4)
    weights = [parameter.detach().clone() for parameter in layer.parameters()]
    expected = _plain(layer, x)
    with torch.no_grad():
        for parameter, weight in zip(layer.parameters(), weights, strict=True):
            parameter.copy_(weight)
    out = _call(layer, x)
    assert len(KEPT) > 1
    out.square().sum().backward()
    assert _runs() == 1
    assert all(map(torch.equal, _gradients(layer), expected))


@pytest.mark.parametrize("times", [2, 3])
def test_each_backward_of_a_graph_that_is_kept_runs_it_again_once(times: int) -> None:
    layer, x = Layer(), torch.randn(3, 4)
    expected = _plain(layer, x)
    loss = _call(layer, x).square().sum()
    _runs()
    for _ in range(times):
        loss.backward(retain_graph=True)
        assert _runs() == 1
        assert all(map(torch.equal, _gradients(layer), expected))


def test_second_derivatives_are_plain_ones() -> None:
    layer, found = Layer(), []
    for call in (lambda x: layer(x), lambda x: _call(layer, x)):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        (first,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        found.append([x.grad, *_gradients(layer)])
    assert all(map(torch.equal, *found))


def test_a_saved_tensor_that_is_read_twice_is_made_twice() -> None:
    def twice(_: nn.Module, x: Tensor) -> Tensor:
        RAN(x.detach())
        return CubedTwice.apply(x.sin())

    x = torch.randn(3, requires_grad=True)
    out = _call(Made(twice), x)
    assert _runs() == 1
    out.sum().backward()
    assert _runs() == 2
    inner = x.detach().sin()
    assert torch.equal(x.grad, 3 * inner * inner * x.detach().cos())  # type: ignore[arg-type]


def test_a_block_that_goes_through_its_own_graph_recomputes() -> None:
    def penalised(self: Any, x: Tensor) -> Tensor:
        inner = self.linear(x).tanh()
        (slope,) = torch.autograd.grad(inner.sum(), x, create_graph=True)
        return inner + slope  # type: ignore[no-any-return]

    layer, found = Made(penalised, linear=nn.Linear(4, 4)), []
    for call in (lambda x: layer(x), lambda x: _call(layer, x)):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        (call(x * 1.0)).square().sum().backward()
        found.append([x.grad, *_gradients(layer)])
    assert all(map(torch.equal, *found))


def test_a_forward_that_raises_leaves_nothing() -> None:
    def fail(_: Any) -> None:
        raise KeyError("no")

    layer = Layer(fail)
    with pytest.raises(KeyError):
        _call(layer, torch.randn(3, 4))
    gc.collect()
    layer.do = None
    _call(layer, torch.randn(3, 4)).sum().backward()


def test_weights_that_are_edited_before_backward_are_named() -> None:
    layer = Layer()
    out = _call(layer, torch.randn(3, 4))
    with torch.no_grad():
        layer.up.weight.add_(1)
    with pytest.raises(OffloadError, match="Layer recomputes, and its weights was edited in place since its forward"):
        out.sum().backward()


def test_a_keyword_tensor_that_is_edited_before_backward_raises_pytorchs_own_error() -> None:
    layer, scale = Layer(), torch.ones(4)
    out = _call(layer, torch.randn(3, 4), scale=scale)
    scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_block_that_saves_other_tensors_when_it_runs_again_is_named() -> None:
    class Growing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            more = torch._C._autograd._get_sequence_nr() % 5 + 1  # which no program can put back
            return torch.cat([x, x[:1].expand(more, -1)]).exp()

    out = _call(Growing(), torch.randn(3, 4, requires_grad=True))
    torch.ones(1, requires_grad=True).exp()  # another node
    with pytest.raises(OffloadError, match="Growing recomputes and saves other tensors when it runs again"):
        out.sum().backward()
