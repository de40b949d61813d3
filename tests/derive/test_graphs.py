"""Recipes in whole graphs: who owns what, edits, partial backwards, and models with gradients equal to the last bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from support.derive import Harness, about, gradients, settle, threads
from support.engine import save
from support.exactness import assert_bit_equal
from support.gpt import GPT, GPTConfig
from support.models import LlamaLayer, Made
from support.zoo import FAMILIES, Family
from tba._derive.operators import same_bits
from tba._derive.search import recipe


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What dies in the test, dies by its reference count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Probe:
    pass


def block(x: Tensor, weight: Tensor) -> Tensor:
    """A graph with each kind of node: own results, derived tensors, weights, attention."""
    x = functional.layer_norm(x, (x.shape[-1],), weight)
    x = functional.silu(x) * torch.tanh(x) * torch.relu(x * 2)
    x = functional.scaled_dot_product_attention(*[x[None, None]] * 3).transpose(1, 2).reshape(x.shape).softmax(-1)
    return save(x) + save(functional.gelu(x))


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("how", ["dropped", "backward", "exception in forward", "exception in backward"])
def test_a_graph_that_goes_takes_its_recipes_along(how: str) -> None:
    harness = Harness()
    leaf, weight = torch.randn(5, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def run() -> None:
        with harness.hooks():
            result = block(leaf * 1, weight)
            if how == "exception in forward":
                raise ZeroDivisionError
        assert all(reference() is not None for reference in harness.recipes)
        if how == "backward":
            result.sum().backward()
            assert all(reference() is None for reference in harness.recipes)  # although `result` is alive
        elif how == "exception in backward":
            result.register_hook(lambda gradient: 1 / 0)
            result.sum().backward()

    if "exception" in how:
        with pytest.raises(ZeroDivisionError):
            run()
    else:
        run()
    assert len(harness.recipes) > 4
    assert [reference() for reference in harness.recipes] == [None] * len(harness.recipes)
    assert [reference() for reference in harness.all_kept] == [None] * len(harness.all_kept)


@pytest.mark.usefixtures("no_collection")
def test_a_recipe_holds_packed_objects_and_no_node() -> None:
    harness = Harness()
    with harness.hooks():
        x = torch.randn(4, requires_grad=True) * 1
        tensor = functional.silu(x)
        made = recipe(tensor, harness.unpack, about)
    assert made is not None
    expected = tensor.detach().clone()
    probe = tensor.grad_fn.metadata["probe"] = Probe()  # nodes take no weak references; this dies with one
    alive = weakref.ref(x), weakref.ref(probe)
    del x, tensor, probe
    assert [reference() for reference in alive] == [None, None]
    assert_bit_equal(made.compute(), expected)


def test_a_second_branch_is_derived_after_the_first_has_freed_the_rest() -> None:
    def both(harness: Harness | None) -> list[Tensor]:
        leaf = torch.linspace(-1, 1, 12).requires_grad_()
        with nullcontext() if harness is None else harness.hooks():
            middle = functional.silu(leaf * 1)
            one, two = save(middle), save(middle)
        one.sum().backward()  # frees the nodes of `middle`
        return [leaf.grad, *torch.autograd.grad(two.sum(), [middle])]

    harness = Harness()
    assert_bit_equal(both(harness), both(None))
    assert harness.derived_bytes == {"SiluBackward0": 48}
    assert harness.computed == 2


@pytest.mark.parametrize("create_graph", [False, True])
def test_twice_backward_and_double_backward(create_graph: bool) -> None:
    def twice(harness: Harness | None) -> list[Tensor]:
        leaf, weight = torch.linspace(-1, 1, 40).reshape(5, 8).requires_grad_(), torch.ones(8, requires_grad=True)
        with nullcontext() if harness is None else harness.hooks():
            x = functional.gelu(leaf * weight) * functional.silu(leaf * 2)
            x = functional.linear(x * x, weight[None])
            (first,) = torch.autograd.grad(x.square().sum(), [leaf], create_graph=create_graph, retain_graph=True)
            total = x.sum() + first.sum() if create_graph else x.sum()
        total.backward()
        return [first.detach(), leaf.grad, weight.grad]

    harness = Harness()
    assert_bit_equal(twice(harness), twice(None))
    assert harness.computed > 0
    assert not harness.refused


def test_an_operand_edited_after_it_was_saved_raises() -> None:
    harness = Harness()
    with harness.hooks():
        x = torch.randn(6, requires_grad=True) * 1
        result = save(functional.silu(x))
        with torch.no_grad():
            x.add_(1)
    assert harness.derived_bytes["SiluBackward0"]
    with pytest.raises(RuntimeError, match="edited in place"):
        result.sum().backward()


def test_an_operand_edited_in_secret_gives_another_tensor() -> None:
    harness = Harness()
    with harness.hooks():
        # Of both signs: six random products are all negative once in 64 times, and nothing is edited then.
        x, y = torch.linspace(-2, 3, 6, requires_grad=True) * 1, torch.full((6,), 1.5, requires_grad=True) * 1
        between = x * y
        with torch.no_grad():
            between.clamp_(max=0)  # leaves no trace at the node
        made = recipe(-between, harness.unpack, about)
        save(-between)
        own = recipe(functional.silu(between), harness.unpack, about)
    assert made is not None
    assert own is not None
    assert harness.refused == {"NegBackward0": 1}
    assert settle(own, functional.silu(between)) is not None  # what its node saved is what it used


def test_an_operator_run_in_place_on_a_narrower_tensor_is_an_error() -> None:
    harness = Harness()
    with harness.hooks():
        x = torch.randn(6, dtype=torch.bfloat16, requires_grad=True) * 1
        save(x)
        y = torch.randn(6, requires_grad=True)
        between = x.clone()
        between.mul_(y)  # bfloat16, while bfloat16 times float32 is float32
        made = recipe(-between, harness.unpack, about)
    assert made is not None
    with pytest.raises(RuntimeError, match=r"recomputed torch.float32 \[6\], but forward had torch.bfloat16 \[6\]"):
        made.compute()


def test_same_bits_sees_payloads_signs_and_types() -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, nan.flip(0))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(1))
    assert same_bits(torch.zeros(2, 3).t(), torch.zeros(3, 2))


# -- models ----------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    return out if isinstance(out, Tensor) else out.loss


def lowered(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, batch)


def compare(model: nn.Module, batch: Any, how: Callable[[nn.Module, Any], Tensor] = loss_of) -> Harness:
    """Gradients without hooks and with whatever is derivable dropped; the second harness has seen two steps."""
    expected = gradients(model, batch, how, None)
    harness = Harness()
    for _ in range(2):
        assert_bit_equal(gradients(model, batch, how, harness), expected)
    assert len(expected) > 10
    assert not harness.refused
    assert harness.computed > 0
    return harness


# The part of the unique bytes that is kept, measured: float32, and float32 under autocast to bfloat16. Tiny models save
# much besides their blocks (dropout masks, attention without a fused kernel), so these are no measure of real ones.
SHARES = {"gpt": (0.68, 0.75), "gpt2": (0.68, 0.74), "bert": (0.70, 0.72), "t5": (0.69, 0.67), "llama": (0.55, 0.53)}


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.name in SHARES], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_gradients_are_bit_equal(family: Family, autocast: bool) -> None:
    torch.manual_seed(0)
    harness = compare(family.make_model(), family.make_batch(), lowered if autocast else loss_of)
    assert harness.share() <= SHARES[family.name][autocast]


def llama_block() -> nn.Module:
    """One block of transformers' Llama, 8/3 of its width inside as in the models in use: tokens [B, S] -> scalar."""
    sizes = {"width": 192, "inner": 512, "heads": 6, "num_key_value_heads": 6}
    layer = LlamaLayer(**sizes)
    return Made(lambda self, ids: self.layer(self.embed(ids)).float().sum(), embed=nn.Embedding(61, 192), layer=layer)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_a_llama_block_keeps_at_most_six_tenths(dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(0)
    model = llama_block().to(dtype)
    with threads(count):
        harness = compare(model, (torch.randint(0, 61, (2, 64)),))
    total = harness.kept_bytes.total() + harness.derived_bytes.total()
    for title, table in (("kept", harness.kept_bytes), ("derived", harness.derived_bytes)):
        for name, nbytes in table.most_common():
            print(f"{title:8} {name:48} {nbytes:9} {nbytes / total:6.1%}")
    assert harness.share() <= (0.56 if dtype == torch.float32 else 0.6)
    assert harness.kept_bytes["SiluBackward0"] == 0
    assert harness.derived_bytes["MulBackward0"] > 0


def test_a_small_gpt_without_dropout_under_two_threads() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, width=96, heads=3, sequence=64, vocab=61))
    with threads(2):
        harness = compare(model, (torch.randint(0, 61, (8, 64)), torch.randint(0, 61, (8, 64))))
    assert harness.kept_bytes["GeluBackward0"] == 0
    assert harness.kept_bytes["NativeLayerNormBackward0"] == 0
    assert harness.derived_bytes["GeluBackward0"] == 2 * 8 * 64 * 4 * 96 * 4  # two steps, four times the width, float32
