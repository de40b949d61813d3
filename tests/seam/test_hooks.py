"""Hooks: on and off one thread's stack, lifted for a region, and tied to a model but not to its copies."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.engine import engine
from support.exactness import assert_bit_equal
from support.models import Made
from tba import OffloadWarning, attach
from tba._torch import hook_stack, module_hooks, private

Pack = Callable[[Tensor], Tensor]


def same(tensor: Tensor) -> Tensor:
    return tensor


class Counting:
    """A pair of hooks that counts what it packs."""

    def __init__(self) -> None:
        self.packed = 0

    def pack(self, tensor: Tensor) -> Tensor:
        self.packed += 1
        return tensor.detach()


def push(pack: Pack, unpack: Pack = same) -> hook_stack.Pair:
    """Make a pair the innermost of this thread."""
    pair = hook_stack.Pair(pack, unpack)
    pair.enter(push=True)
    return pair


def save() -> None:
    """Save one tensor for backward."""
    torch.ones(3, requires_grad=True).sin()


@pytest.fixture(autouse=True)
def _stack_is_left_as_it_was() -> Iterator[None]:
    assert private.top_hooks(True) is None
    yield
    assert private.top_hooks(True) is None


def test_the_innermost_pair_is_called_and_only_while_it_is_on() -> None:
    outer, inner = Counting(), Counting()
    first = push(outer.pack)
    save()
    second = push(inner.pack)
    save()
    second.pop()
    save()
    first.pop()
    save()
    assert (outer.packed, inner.packed) == (2, 1)


def test_a_pair_belongs_to_one_thread() -> None:
    pair = Counting()
    pushed = push(pair.pack)
    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    pushed.pop()
    assert pair.packed == 0


def test_where_hooks_are_disabled_a_warning_says_so() -> None:
    pair = Counting()
    with torch.autograd.graph.disable_saved_tensors_hooks("not in this region"):
        with pytest.warns(OffloadWarning, match="hooks are disabled here .*not in this region.*nothing is offloaded"):
            pushed = push(pair.pack)
        assert not pushed.pushed
        save()
        pushed.pop()
    assert pair.packed == 0


def test_lifted_for_a_region_and_back_in_the_same_order() -> None:
    pair = Counting()
    unpacks = (lambda tensor: tensor, lambda tensor: tensor)  # entered twice; told apart by their unpack
    pushed = [push(pair.pack, unpack) for unpack in unpacks]
    with hook_stack.lifted(pair.pack):
        assert private.top_hooks(True) is None
        save()
    assert pair.packed == 0
    for unpack in reversed(unpacks):
        top = private.top_hooks(True)
        assert top is not None
        assert top == (pair.pack, unpack)
        pushed.pop().pop()


def test_pairs_of_others_are_left_alone() -> None:
    ours, other = Counting(), Counting()
    theirs_pushed, ours_pushed = push(other.pack), push(ours.pack)
    with hook_stack.lifted(ours.pack):
        save()  # theirs is beneath ours and acts now
    with torch.autograd.graph.saved_tensors_hooks(other.pack, same), hook_stack.lifted(ours.pack):
        save()  # theirs is above ours, which does not act anyway
    assert (ours.packed, other.packed) == (0, 2)
    save()
    assert ours.packed == 1
    ours_pushed.pop()
    theirs_pushed.pop()


def test_an_exception_in_the_region_brings_the_pair_back() -> None:
    pair = Counting()
    pushed = push(pair.pack)
    with pytest.raises(ZeroDivisionError), hook_stack.lifted(pair.pack):
        raise ZeroDivisionError
    save()
    pushed.pop()
    assert pair.packed == 1


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


def test_leave_after_a_forward_that_raises() -> None:
    model, _ = tied()
    with pytest.raises(ValueError, match="told to"):
        model(torch.ones(4), fail=True)
    assert model.calls == ["enter", "forward", "leave"]


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
        saved_bytes = offload.stats().saved_bytes
        assert saved_bytes > 0
        after = function(leaf)
        assert offload.stats().saved_bytes == 2 * saved_bytes  # it acts again
        (before + after).backward()
        assert_bit_equal(leaf.grad, plain.grad)
