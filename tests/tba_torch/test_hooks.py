"""Hooks: on and off one thread's stack, lifted for a region, and tied to a model but not to its copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.engine import engine
from support.exactness import assert_bit_equal
from support.models import Made
from tba import attach
from tba._torch import module_hooks, private


@pytest.fixture(autouse=True)
def _stack_is_left_as_it_was() -> Iterator[None]:
    assert private.top_hooks(True) is None
    yield
    assert private.top_hooks(True) is None


# -- tied to a model -----------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Notes when its forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.calls: list[str] = []
        self.copies: list[int] = []

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        self.calls.append("forward")
        if fail:
            raise ValueError("told to")
        return (self.weight * x).sin()


def tied() -> tuple[Model, Callable[[], None]]:
    model = Model()
    calls, copies = model.calls, model.copies
    enter, leave, copied = (
        (lambda *_: calls.append("enter")),
        (lambda: calls.append("leave")),
        (lambda: copies.append(1)),
    )
    return model, module_hooks.tie(model, enter, leave, copied)


def test_enter_and_leave_with_each_forward_until_untied() -> None:
    model, untie = tied()
    assert model(torch.ones(4), fail=False).shape == (4,)
    model(x=torch.ones(4))
    assert model.calls == ["enter", "forward", "leave"] * 2
    untie()
    model(torch.ones(4))
    assert model.calls[6:] == ["forward"]
    untie()


def test_enter_comes_before_the_hooks_that_were_there() -> None:
    model = Model()
    model.register_forward_pre_hook(lambda *_: model.calls.append("theirs"))
    enter, leave = (lambda *_: model.calls.append("enter")), (lambda: model.calls.append("leave"))
    module_hooks.tie(model, enter, leave, lambda: None)
    model(torch.ones(4))
    assert model.calls == ["enter", "theirs", "forward", "leave"]


def _pickled(model: nn.Module) -> nn.Module:
    copied = pickle.loads(pickle.dumps(model))
    assert isinstance(copied, nn.Module)
    return copied


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


@pytest.mark.parametrize("copying", [copy.deepcopy, _pickled, _saved], ids=["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_not_tied_and_works(copying: Callable[[nn.Module], nn.Module]) -> None:
    model, untie = tied()
    copied = copying(copying(model))  # also a copy of a copy
    assert isinstance(copied, Model)
    x = torch.randn(4)
    assert_bit_equal(copied(x), Model()(x))
    assert copied.calls == ["forward"]
    assert model.calls == []
    assert model.copies
    model(x)
    assert model.calls == ["enter", "forward", "leave"]
    untie()
    model(x)
    assert model.calls[3:] == ["forward"]


def test_a_hook_ahead_of_ours_that_raises_leaves_the_context_of_others_alone(scratch: Path) -> None:
    model = nn.Linear(8, 8)
    offload = attach(model, "nvme", min_tensor_bytes=0, storage_paths=scratch)

    def refuses(*_: object) -> None:
        raise ValueError("not now")

    with offload:
        handle = nn.modules.module.register_module_forward_pre_hook(refuses)
        with handle, pytest.raises(ValueError, match="not now"):
            model(torch.randn(5, 8))
        assert offload.entered
        torch.randn(5, 8, requires_grad=True).sin()
        assert offload.stats().saved_bytes > 0
    assert not offload.entered
    offload.close()


def test_closed_by_the_models_own_forward(scratch: Path) -> None:
    model = Made(lambda _, x: (offload.close(), x.sin())[1])
    offload = attach(model, "nvme", min_tensor_bytes=0, storage_paths=scratch)
    model(torch.randn(8, requires_grad=True)).sum().backward()
    assert not offload.entered
    assert private.top_hooks(True) is None


# -- torch.func ----------------------------------------------------------------------------------------------------


def test_a_region_for_torch_func_inside_of_the_context(scratch: Path) -> None:
    def function(x: Tensor) -> Tensor:
        return (x.sin() * x).sum()

    x = torch.randn(64)
    expected = torch.func.grad(function)(x)
    plain = x.clone().requires_grad_()
    (function(plain) + function(plain)).backward()
    with engine(scratch) as offload, offload, offload:  # entered twice: all of it is lifted
        leaf = x.clone().requires_grad_()
        before = function(leaf)
        with offload.suspend():
            assert_bit_equal(torch.func.grad(function)(x), expected)
            assert_bit_equal(torch.func.vmap(torch.func.grad(function))(x.expand(3, 64)), expected.expand(3, 64) + 0)
        with pytest.raises(ZeroDivisionError), offload.suspend():
            raise ZeroDivisionError
        saved_bytes = offload.stats().saved_bytes
        assert saved_bytes > 0
        after = function(leaf)
        assert offload.stats().saved_bytes == 2 * saved_bytes  # it acts again
        (before + after).backward()
        assert_bit_equal(leaf.grad, plain.grad)
