"""A program's own code (custom Functions, `_saved_*`) is given memory of its own, so its edits show nowhere else.

A gradient that a Function returns becomes a leaf's `.grad` as it is where nobody else refers to the tensor. In plain
PyTorch the node that saved it does; nothing refers to a view made for unpack, so its memory must not be shared either.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.engine import engine
from support.exactness import assert_bit_equal
from support.models import Looks, Made
from tba import OffloadConfig, Offloader

N = 64
# Kept, compressed in place, in memory at backward, in the file at backward, the same made smaller.
ARMS: dict[str, dict[str, Any]] = {
    "keep": {"tier": "keep"},
    "keep exact": {"tier": "keep", "compress": "exact"},
    "auto": {"tier": "auto"},
    "held": {},
    "stored": {},
    "stored exact": {"compress": "exact"},
}


class Loss(torch.autograd.Function):
    """sum(w * g), as fused losses do it: the gradient is what was saved."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(g)
        return (w * g).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (g,) = ctx.saved_tensors
        return g, None


class Edit(torch.autograd.Function):
    """2 x^2, whose backward doubles what it saved in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.mul_(4)


Case = Callable[[Callable[[], None]], Any]


def leaf(seed: int, *size: int) -> Tensor:
    return torch.randn(*(size or (N, N)), generator=torch.Generator().manual_seed(seed)).requires_grad_()


def the_data_of_a_program(flush: Callable[[], None]) -> Any:
    w, data = leaf(0), leaf(1).detach()
    loss = Loss.apply(w, data)
    flush()
    loss.backward()
    w.grad.zero_()
    return data


def an_activation_that_lives_on(flush: Callable[[], None]) -> Any:
    w, x = leaf(0), leaf(1)
    hidden = x * 2
    loss = Loss.apply(w, hidden)
    flush()
    loss.backward()
    w.grad.zero_()
    return hidden.detach()


def one_graph_several_times(flush: Callable[[], None]) -> Any:
    w, data = leaf(0), leaf(1).detach()
    loss = Loss.apply(w, data)
    flush()
    for number in range(3):
        loss.backward(retain_graph=number < 2)
    return w.grad


def two_leaves_and_an_optimizer(flush: Callable[[], None]) -> Any:
    one, other, data = leaf(0), leaf(1), leaf(2).detach()
    loss = Loss.apply(one, data) + Loss.apply(other, data)
    flush()
    loss.backward()
    nn.utils.clip_grad_norm_([one, other], 1.0)
    torch.optim.SGD([one, other], 0.1, weight_decay=0.1).step()
    return one, other, one.grad, other.grad, data


def views_of_one_storage(flush: Callable[[], None]) -> Any:
    w = [leaf(number, N, 1 + number) for number in range(3)]
    whole = leaf(7, N, 6).detach()
    loss = sum(Loss.apply(a, part) for a, part in zip(w, whole.split([1, 2, 3], dim=1), strict=True))
    flush()
    loss.backward()
    found = [a.grad.clone() for a in w]
    for a in w:
        a.grad.zero_()
    return found, whole


CASES: list[Case] = [
    the_data_of_a_program,
    an_activation_that_lives_on,
    one_graph_several_times,
    two_leaves_and_an_optimizer,
    views_of_one_storage,
]


def run(case: Callable[[Callable[[], None]], Any], arm: str, scratch: Path) -> Any:
    with engine(scratch, **ARMS[arm]) as offload:
        with offload:
            found = case(offload.flush if arm.startswith("stored") else lambda: None)
        gc.collect()
        assert offload.stats().live_records == 0
    return found


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_gradient_that_was_saved_is_nobody_elses_memory(case: Case, arm: str, scratch: Path) -> None:
    assert_bit_equal(run(case, arm, scratch), case(lambda: None))


@pytest.mark.parametrize("arm", ARMS)
def test_an_edit_of_what_was_unpacked_shows_to_nobody_else(arm: str, scratch: Path) -> None:
    """Plain PyTorch raises at the second one that saved it; here that one gets what was saved."""

    def edits(flush: Callable[[], None]) -> Any:
        w = leaf(0)
        x = w * 1.5
        loss = (x.sin() + Edit.apply(x)).sum()  # the latter's backward runs first
        del x
        flush()
        loss.backward(retain_graph=True)
        first = w.grad.clone()
        loss.backward()
        return first, w.grad - first

    w = leaf(0)
    x = w * 1.5
    (x.sin() + 2 * x * x).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        edits(lambda: None)
    first, second = run(edits, arm, scratch)
    torch.testing.assert_close(first, w.grad)
    torch.testing.assert_close(second, w.grad)


@pytest.mark.parametrize("arm", ARMS)
def test_an_edit_of_what_a_node_shows_does_not_reach_backward(arm: str, scratch: Path) -> None:
    def looks(flush: Callable[[], None]) -> Any:
        w = leaf(0)
        x = w * 1.5
        y = x.sin()
        flush()
        with torch.no_grad():
            y.grad_fn._saved_self.zero_()
        y.sum().backward()
        return w.grad

    w = leaf(0)
    (w * 1.5).sin().sum().backward()
    assert_bit_equal(run(looks, arm, scratch), w.grad)


def test_what_nobody_else_has_is_given_away_without_a_copy(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    monkeypatch.setattr("tba._record.user_code.apart", lambda tensor: copied.append(tensor.nbytes) or tensor.clone())

    def chain(flush: Callable[[], None]) -> Any:
        x = leaf(0)
        y = x
        for _ in range(4):
            y = Edit.apply(y * 1)
        flush()
        y.sum().backward()
        return x.grad

    for arm in ARMS:
        run(chain, arm, scratch)
        assert not copied, arm


class Token:
    pass


def a_buffer(model: Any, x: Tensor) -> Tensor:
    return model.state.mul_(0.5).add_(x).sigmoid_()


def a_frozen_weight(model: Any, x: Tensor) -> Tensor:
    return model.frozen.mul_(x).exp_()


def a_view_of_a_frozen_weight(model: Any, x: Tensor) -> Tensor:
    return model.frozen.view(4, -1).mul_(x.view(4, -1)).exp_()


@pytest.mark.parametrize("edit", [a_buffer, a_frozen_weight, a_view_of_a_frozen_weight])
@pytest.mark.filterwarnings("ignore:tier='nvme' moved nothing")
@pytest.mark.parametrize("tier", ["keep", "nvme"])
def test_an_operator_in_place_on_a_weight_leaves_no_cycle(
    edit: Callable[[Any, Tensor], Tensor], tier: str, scratch: Path
) -> None:
    """It saves its own output: if the node that made it held it as it is, nothing would ever collect the two."""
    weight, frozen = nn.Parameter(torch.rand(N)), nn.Parameter(torch.rand(N), requires_grad=False)
    model: Any = Made(lambda *_: None, weight=weight, frozen=frozen, state=torch.rand(N))
    token, ended = Token(), list[str]()
    del weight, frozen
    weakref.finalize(token, ended.append, "graph")
    offload = Offloader(model, OffloadConfig(tier=tier, min_tensor_bytes=0, storage_paths=scratch))
    with offload:
        edit(model, Looks.apply(model.weight, token))  # whose node has the token
    assert offload.stats().weight_bytes > 0
    del token
    gc.collect()
    assert not ended, "the model's own tensors have the graph"
    del model
    gc.collect()
    assert ended
    offload.close()


@pytest.mark.parametrize("arm", ARMS)
def test_a_function_made_in_passing_is_not_kept_by_what_was_learned_of_its_node(arm: str, scratch: Path) -> None:
    """It may have a compiled graph, or whatever else its class refers to, with it."""

    def train(flush: Callable[[], None]) -> weakref.ref[type]:
        class Passing(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return x * 2

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                (x,) = ctx.saved_tensors
                return gradients[0] * 2 + 0 * x

        x = leaf(0)
        y = Passing.apply(x * 1).sin() + Passing.apply(x * 3).t().sin().relu()
        flush()
        y.sum().backward()
        return weakref.ref(Passing)

    watched = run(train, arm, scratch)
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("settings", ARMS.values(), ids=ARMS)
def test_sparse_tensors_stay_and_nested_ones_do_not(settings: dict[str, Any], scratch: Path) -> None:
    layer, sparse = nn.Linear(4, 4), nn.Parameter(torch.eye(8).to_sparse())
    x = leaf(0, 8, 3)

    def train() -> Any:
        layer.zero_grad()
        nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
        loss = torch.nested.to_padded_tensor(layer(nested).relu() * 2, 0.0).sum()
        x.grad = sparse.grad = None
        (loss + torch.sparse.mm(sparse, x).sum()).backward()
        return [layer.weight.grad.clone(), layer.bias.grad.clone(), x.grad, sparse.grad.coalesce()]

    expected = train()
    with engine(scratch, **settings) as offload:
        with offload:
            found = train()
        stats = offload.stats()
    assert_bit_equal(found, expected)
    assert not any("ested" in reason for reason in stats.kept_by_reason)
    assert stats.weight_bytes > 0


def test_a_lazy_module_is_marked_once_it_has_memory(scratch: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(N), nn.ReLU(), nn.LazyLinear(1))
    with engine(scratch, model=model) as offload:
        for _ in range(3):
            with offload:
                loss = model(torch.ones(2, 8)).sum()
            loss.backward()
        assert offload.stats().weight_bytes > 0


@pytest.mark.parametrize("tier", ["keep", "nvme"])
def test_what_waits_for_its_codec_may_be_let_go_in_inference_mode(tier: str, scratch: Path) -> None:
    def train(flush: Callable[[], None]) -> Any:
        w = leaf(0)
        hidden = (w > 0) * w.bfloat16().float()
        loss = (hidden.sin() * hidden).tanh().sum()
        with torch.inference_mode():
            flush()
        loss.backward()
        return w.grad

    with engine(scratch, tier=tier, compress="exact") as offload:
        for _ in range(3):
            with offload:
                assert_bit_equal(train(offload.flush), train(lambda: None))
        assert offload.stats().packed_bytes > 0
