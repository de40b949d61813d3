"""Weights: recognised in every guise autograd hands them over in, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.engine import engine, save
from support.models import Made
from tba import OffloadStats
from tba._torch.weights import MARK, WEIGHT, leads_to_parameter, mark_weights

# The engine warns where a tier moves nothing, which is what most tests here are about.
pytestmark = pytest.mark.filterwarnings("ignore:tier='nvme' moved nothing in its first step")

aten = torch.ops.aten
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "transpose": lambda w: w.transpose(0, 1),
    "swapdims": lambda w: w.swapdims(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "movedim": lambda w: w.movedim(0, 1),
    "view": lambda w: w.view(2, 32),
    "flatten": lambda w: w.flatten(),
    "unflatten": lambda w: w.unflatten(0, (2, 4)),
    "unsafe_view": lambda w: aten._unsafe_view(w, [2, 32]),
    "reshape_alias": lambda w: aten._reshape_alias(w, [64], [1]),
    "expand": lambda w: w.expand(3, 8, 8),
    "as_strided": lambda w: w.as_strided((4, 4), (8, 1)),
    "select": lambda w: w[3],
    "slice": lambda w: w[1:5],
    "narrow": lambda w: w.narrow(1, 2, 3),
    "split": lambda w: w.split(4)[1],
    "chunk": lambda w: w.chunk(2, 1)[1],
    "split_with_sizes": lambda w: w.split([3, 5])[1],
    "unsafe_split": lambda w: aten.unsafe_split(w, 4)[1],
    "unbind": lambda w: w.unbind()[2],
    "diagonal": lambda w: w.diagonal(),
    "alias": lambda w: aten.alias(w),
    "squeeze": lambda w: w[1:2].squeeze(),
    "squeeze(0)": lambda w: w[1:2].squeeze(0),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "unfold": lambda w: w.unfold(0, 2, 1),
    "view_as_complex": lambda w: torch.view_as_complex(w.view(8, 4, 2)),
    "conj": lambda w: torch.view_as_complex(w.view(8, 4, 2)).conj(),
    "view_as_real": lambda w: torch.view_as_real(torch.view_as_complex(w.view(8, 4, 2))),
    "cast": lambda w: w.to(torch.bfloat16),
    "cast and views": lambda w: w.to(torch.bfloat16).t()[2:].unsqueeze(0),
    "views and cast": lambda w: w.t()[2:].double(),
    "two casts": lambda w: w.double().half(),
}
CASTS = {"cast", "cast and views", "views and cast", "two casts"}
UNSAFE = {"unsafe_view", "unsafe_split"}  # views that autograd does not know to be ones


def parameter(requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.randn(8, 8), requires_grad=requires_grad)


def stats_of(tensor: Tensor, scratch: Path, model: nn.Module | None = None) -> OffloadStats:
    """What the engine makes of one saved tensor; the graph needs a gradient whatever the tensor is."""
    with engine(scratch, model=model) as offload:
        with offload:
            _ = save(tensor) if tensor.requires_grad else torch.ones((), requires_grad=True) * tensor
        return offload.stats()


def is_weight(tensor: Tensor, scratch: Path, model: nn.Module | None = None) -> bool:
    stats = stats_of(tensor, scratch, model)
    assert stats.saved_bytes > 0
    assert (stats.weight_bytes > 0) is not (stats.offloaded_bytes > 0)
    return stats.weight_bytes > 0


@pytest.mark.parametrize("name", VIEWS)
def test_a_chain_of_views_and_casts_leads_to_its_parameter(name: str, scratch: Path) -> None:
    look = VIEWS[name](parameter())
    assert leads_to_parameter(look.grad_fn)
    if not look.is_complex():
        assert is_weight(look, scratch)


@pytest.mark.parametrize("name", sorted(VIEWS.keys() - CASTS - UNSAFE))
def test_a_view_of_a_frozen_parameter_is_known_by_its_base(name: str, scratch: Path) -> None:
    look = VIEWS[name](parameter(requires_grad=False))
    assert look.grad_fn is None
    if not look.is_complex():
        assert is_weight(look, scratch)


class OfTheirOwn(nn.Parameter):
    """A subclass, as libraries for quantization have them."""


def test_a_subclass_of_parameter(scratch: Path) -> None:
    weight = OfTheirOwn(torch.randn(8, 8))
    assert leads_to_parameter(weight.t().grad_fn)
    assert is_weight(weight.t(), scratch)


# -- what is none --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w * 1,
        lambda w: w.t() + 0,
        lambda w: w.clone(),
        lambda w: w.t().contiguous(),
        lambda w: w.t().reshape(64),  # has to copy
        lambda w: (w * 1).t(),
        lambda w: (w * 1).to(torch.bfloat16),
        lambda w: torch.cat([w, w]),
        lambda w: w.sum(0),
    ],
)
def test_what_is_computed_from_a_weight_is_an_activation(make: Callable[[Tensor], Tensor], scratch: Path) -> None:
    tensor = make(parameter())
    assert not leads_to_parameter(tensor.grad_fn)
    assert not is_weight(tensor, scratch)


@pytest.mark.parametrize(
    "look", [lambda x: x, lambda x: x.t(), lambda x: x.to(torch.bfloat16), lambda x: x[1:].double()]
)
def test_a_leaf_is_no_weight_for_being_one(look: Callable[[Tensor], Tensor], scratch: Path) -> None:
    leaf = torch.randn(8, 8, requires_grad=True)
    assert not leads_to_parameter(look(leaf).grad_fn)
    assert not is_weight(look(leaf), scratch)


def test_a_cast_that_autograd_does_not_link_is_an_activation(scratch: Path) -> None:
    """Frozen weights under autocast: a documented limit."""
    assert not is_weight(parameter(requires_grad=False).to(torch.bfloat16), scratch)


def test_an_input_beside_a_parameter_is_followed_to_its_own_end() -> None:
    weight, x = parameter(), torch.randn(8, 8, requires_grad=True)
    assert not leads_to_parameter((x @ weight).t().grad_fn)
    assert not leads_to_parameter(torch.stack([weight, weight])[0].grad_fn)


class ToCopy(torch.autograd.Function):
    """A user's function with a name that sounds like a cast."""

    @staticmethod
    def forward(ctx: object, w: Tensor) -> Tensor:
        return w * 2

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def test_a_function_of_the_user_is_no_cast_whatever_its_name() -> None:
    result = ToCopy.apply(parameter())
    assert isinstance(result, Tensor)
    assert not leads_to_parameter(result.grad_fn)


def test_a_chain_longer_than_any_in_practice_is_given_up() -> None:
    look: Tensor = parameter()
    for _ in range(7):
        look = look.t()
    assert leads_to_parameter(look.grad_fn)
    for _ in range(7):
        look = look.t()
    assert not leads_to_parameter(look.grad_fn)


# -- with a model --------------------------------------------------------------------------------------------------


def _model() -> Any:
    """A parameter, a buffer, and buffers that cannot be marked."""
    sparse, meta = torch.eye(3).to_sparse(), torch.empty(5, device="meta")
    buffers = {"table": torch.randn(16, 8), "sparse": sparse, "meta": meta, "nothing": None}
    return Made(lambda *_: None, weight=parameter(), **buffers)


def marked(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), MARK, None) is WEIGHT


def test_buffers_and_their_views_are_marked_through_the_model(scratch: Path) -> None:
    model = _model()
    table = model.get_buffer("table")
    assert not is_weight(table, scratch)  # nobody told
    assert is_weight(table, scratch, model)
    assert is_weight(table[3:].t(), scratch, model)
    assert is_weight(model.weight.detach(), scratch, model)
    assert not is_weight(table.clone(), scratch, model)


def test_a_mark_names_the_storage_and_dies_with_it() -> None:
    model = _model()
    mark_weights(model)
    assert marked(model.weight)
    assert marked(model.get_buffer("table").view(4, 32).detach())
    address = model.weight.data_ptr()
    model.weight.data = torch.zeros(8, 8)
    del model.weight
    others = [torch.empty(8, 8) for _ in range(64)]  # one of them may get that very address
    assert not any(marked(other) for other in others), address


def test_a_model_that_changes_its_storages_is_marked_anew(scratch: Path) -> None:
    """Casts, moves and loading may replace storages between steps; each step learns them again."""
    model = _model()
    with engine(scratch, model=model) as offload:
        for step in range(3):
            model.register_buffer("table", torch.randn(16, 8))
            table = model.get_buffer("table")
            x = torch.randn(16, 8, requires_grad=True)
            with offload:
                y = (x * 1) * table
            y.sum().backward()
            assert offload.stats().weight_bytes == (step + 1) * table.nbytes
