"""What TRL and torchtune test of their own activation offloading, asked of this one, with counts where they have none.

Theirs: tests/test_activation_offloading.py of TRL, tests/torchtune/training/test_activation_offloading.py of torchtune.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from support.engine import activation, engine, save
from support.exactness import assert_bit_equal
from support.zoo import add_low_rank
from tba import Offloader

VOCABULARY = 64


def llama(*, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=tied)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(1))


def passes(model: nn.Module, *around: Any) -> list[Any]:
    """Loss, logits and gradients of a forward inside of the contexts `around`, and a backward outside of them."""
    torch.manual_seed(42)  # of dropout
    if around:
        with around[0]:
            out = model(input_ids=tokens(), labels=tokens())
    else:
        out = model(input_ids=tokens(), labels=tokens())
    out.loss.backward()
    found = [out.loss.detach(), out.logits.detach(), *(None if p.grad is None else p.grad for p in model.parameters())]
    model.zero_grad()
    return found


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20], ids=["no read-ahead", "read-ahead"])
def test_offloading_is_the_same_as_without(prefetch_bytes: int, scratch: Path) -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(3)), nn.ReLU())
    x = torch.randn(2, 10)
    model(x).sum().backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with engine(scratch, model=model, prefetch_bytes=prefetch_bytes) as offload:
        with offload:
            loss = model(x).sum()
        offload.flush()
        loss.backward()
        assert_bit_equal([parameter.grad for parameter in model.parameters()], plain)
        assert offload.stats().read_bytes > 0


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_of_transformers_has_the_same_outputs_and_gradients(tied: bool, scratch: Path) -> None:
    model = llama(tied=tied)
    plain = passes(model)
    with engine(scratch, model=model) as offload:
        for _ in range(2):
            assert_bit_equal(passes(model, offload), plain)
        stats = offload.stats()
    assert stats.offloaded_bytes > 0
    assert stats.live_records == 0


def test_adapters_beside_frozen_weights_get_the_same_gradients(scratch: Path) -> None:
    model = add_low_rank(llama())
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features == 4:
            module.register_forward_hook(lambda _, __, out: nn.functional.dropout(out, 0.1))
    plain = passes(model)
    assert sum(gradient is not None for gradient in plain[2:]) == 2 * 15  # two of each adapter, none of what is frozen
    with engine(scratch, model=model) as offload:
        assert_bit_equal(passes(model, offload), plain)
        stats = offload.stats()
    frozen = [p for p in model.parameters() if not p.requires_grad and p.ndim == 2]
    assert stats.offloaded_bytes > 0
    assert stats.weight_bytes >= sum(p.nbytes for p in frozen) - VOCABULARY * 32 * 4  # an embedding saves indices


def test_a_region_without_offloading_inside_of_one_with_it(scratch: Path) -> None:
    """Both passes inside of the context, as theirs; the hooks are back after the region."""
    model = llama()

    def whole(offload: Offloader) -> tuple[list[Any], int]:
        before = offload.stats().offloaded_bytes
        return passes(model), offload.stats().offloaded_bytes - before

    plain = passes(model)
    with engine(scratch, model=model) as offload, offload:
        first, moved_bytes = whole(offload)
        with offload.suspend():
            second, moved_in_region_bytes = whole(offload)
        third, moved_again_bytes = whole(offload)
    for found in (first, second, third):
        assert_bit_equal(found, plain)
    assert moved_bytes == moved_again_bytes > 0
    assert moved_in_region_bytes == 0


def test_what_is_smaller_than_the_least_size_stays(scratch: Path) -> None:
    leaf, x = activation(2, 1000)
    with engine(scratch, min_tensor_bytes=1000) as offload:
        with offload:
            small, large = save(x[:, :5] * 1), save(x * 1)
        offload.flush()
        stats = offload.stats()
        (small.sum() + large.sum()).backward()
    assert stats.offloaded_bytes == x.nbytes
    assert stats.kept_by_reason == {"below min_tensor_bytes": 2 * 5 * 4}
    expected = 2 * leaf.detach()
    expected[:, :5] *= 2
    assert_bit_equal(leaf.grad, expected)


def test_views_of_one_output_are_moved_once(scratch: Path) -> None:
    leaf, x = activation(10, 100)
    with engine(scratch) as offload:
        with offload:
            y = x * 1
            loss = save(y.view(-1)).sum() + save(y.transpose(0, 1)).sum()
        offload.flush()
        stats = offload.stats()
        assert (stats.offloaded_bytes, stats.duplicate_bytes, stats.live_records) == (x.nbytes, x.nbytes, 1)
        del y
        loss.backward()
        assert offload.stats().live_records == 0
    assert_bit_equal(leaf.grad, 4 * leaf.detach())


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:],
        lambda x: x[:, 1:],
        lambda x: x[:, ::3],
        lambda x: x.t(),
        lambda x: x[0].expand(7, -1),
        lambda x: x.unfold(1, 4, 2),
    ],
    ids=["shifted rows", "shifted columns", "strided", "transposed", "broadcast", "overlapping"],
)
def test_a_view_of_any_kind_has_the_gradient_of_plain_pytorch(view: Callable[[Tensor], Tensor], scratch: Path) -> None:
    leaf, x = activation(8, 24)
    plain = leaf.detach().clone().requires_grad_()
    save(view(plain + 0)).sum().backward()
    with engine(scratch) as offload:
        with offload:
            y = save(view(x))
        offload.flush()
        y.sum().backward()
        assert offload.stats().read_bytes > 0
    assert_bit_equal(leaf.grad, plain.grad)


def test_parameters_are_told_from_activations(scratch: Path) -> None:
    """Of two linear layers, the weight of the second alone is saved; and the input of each."""
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 10))
    x = torch.randn(4, 10)
    with engine(scratch, model=model) as offload:
        with offload:
            loss = model(x).sum()
        offload.flush()
        stats = offload.stats()
        loss.backward()
    assert stats.weight_bytes == model[1].weight.nbytes
    assert stats.offloaded_bytes == 4 * 10 * 4 + 4 * 20 * 4


class GivesAView(torch.autograd.Function):
    """Its gradient is a view of what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.t())
        return x.new_zeros(2, 4)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        turned: Tensor = saved.t()
        return turned


class Looks(torch.autograd.Function):
    """Unpacks what it has saved, of other values, and says whether the gradient that passes is all ones still."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[bool]) -> Tensor:
        ctx.save_for_backward(torch.full_like(x, 5))
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (_,) = ctx.saved_tensors
        ctx.seen.append(bool((gradients[0] == 1).all()))
        return gradients[0], None


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 30], ids=["no read-ahead", "read-ahead"])
def test_a_gradient_that_is_a_view_of_what_was_unpacked_stays_as_it_is(prefetch_bytes: int, scratch: Path) -> None:
    """Its memory is not given to what is unpacked next, for as long as the view lives."""
    seen: list[bool] = []
    leaf = torch.ones(256, 1024, requires_grad=True)
    with engine(scratch, prefetch_bytes=prefetch_bytes) as offload:
        for _ in range(3):  # the order is learned
            with offload:
                x: Any = leaf
                for _ in range(6):
                    x = Looks.apply(x, seen)
                loss = GivesAView.apply(x).sum()
            offload.flush()
            loss.backward()
        assert offload.stats().read_bytes >= 3 * 7 * leaf.nbytes
    assert seen == [True] * 18
    assert_bit_equal(leaf.grad, torch.full_like(leaf, 3))


def test_forwards_of_two_contexts_then_their_backwards_and_a_graph_that_is_kept(scratch: Path) -> None:
    """Where a table of tensors is emptied as a context is entered, the first backward finds nothing."""
    model = llama()
    loss, _, *plain = passes(model)
    with engine(scratch, model=model) as offload:
        losses = []
        for _ in range(2):
            torch.manual_seed(42)
            with offload:
                losses.append(model(input_ids=tokens(), labels=tokens()).loss)
        offload.flush()
        for each in (*losses, losses[0]):
            gradients = torch.autograd.grad(each, list(model.parameters()), retain_graph=True)
            assert_bit_equal([each.detach(), *gradients], [loss, *plain])
