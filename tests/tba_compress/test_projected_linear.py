"""Linear layers taken over: what stays equal to the last bit, what is saved, and the weight gradient's mean."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from compact import Projected, RankError, Sampled, key
from support.classes import saved
from support.zoo import FAMILIES
from tba._compress.calls import SavedBy
from tba._compress.projected_linear import ProjectedLinear
from tba._errors import ConfigError

TOKENS, N, OUT, RANK = 24, 16, 12, 4
PROJECTED = Projected(RANK)


def mode_of(projected: Projected | Sampled = PROJECTED, **settings: Any) -> SavedBy:
    return SavedBy(linear=ProjectedLinear(projected, **settings))


def run(function: Callable[..., Tensor], mode: SavedBy | None, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The result and the gradients of inputs, from a fixed output gradient."""
    if mode is None:
        out = function(*inputs)
    else:
        with mode:
            out = function(*inputs)
    grad = torch.linspace(-1, 1, out.numel()).view_as(out).sin().to(out.dtype)
    return out.detach(), list(torch.autograd.grad(out, inputs, grad))


def equal(one: list[Tensor], two: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, two, strict=True)]


def operands(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    x, w, b = (torch.randn(*s, generator=generator).to(dtype) for s in ((*shape, N), (OUT, N), (OUT,)))
    return x.requires_grad_(), nn.Parameter(w), nn.Parameter(b)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(x, weight, bias)


FORMS: dict[str, Callable[..., Tensor]] = {
    "linear": linear,
    "by keyword": lambda x, w, b: functional.linear(input=x, weight=w, bias=b),
    "without bias": lambda x, w, b: functional.linear(x, w) + b,
    "transposed": lambda x, w, b: functional.linear(x.transpose(0, 1), w, b),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("projected", [PROJECTED, Sampled(RANK)], ids=lambda codec: codec.name)
def test_all_but_the_weight_gradient_is_equal_to_the_last_bit(
    form: str, dtype: torch.dtype, projected: Projected | Sampled
) -> None:
    inputs = operands(3, 8, dtype=dtype)
    out, grads = run(FORMS[form], None, *inputs)
    out_c, grads_c = run(FORMS[form], mode_of(projected), *inputs)
    assert torch.equal(out, out_c)
    assert equal(grads, grads_c) == [True, False, True]
    assert [grad.dtype for grad in grads_c] == [dtype] * 3


def test_autocast() -> None:
    def cast(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear(*inputs)

    inputs = operands(3, 8)
    out, grads = run(cast, None, *inputs)
    out_c, grads_c = run(cast, mode_of(), *inputs)
    assert torch.equal(out, out_c)
    assert out.dtype == torch.bfloat16
    assert equal(grads, grads_c) == [True, False, True]


def test_only_the_projection_is_saved_and_it_stays_exact() -> None:
    inputs = operands(3, 8)
    rows = TOKENS * RANK // N
    sampled = [("index", (rows,)), ("unknown", (rows,)), ("unknown", (rows, N))]
    assert saved(lambda: linear(*inputs), mode_of(Sampled(RANK))) == sampled
    assert saved(lambda: linear(*inputs), mode_of()) == [("unknown", (TOKENS, RANK))]
    assert saved(lambda: linear(*inputs)) == [("linear_input", (TOKENS, N))]


# -- which projection -------------------------------------------------------------------------------------------------


def grad_of(mode: SavedBy, inputs: tuple[Tensor, ...]) -> Tensor:
    return run(linear, mode, *inputs)[1][1]


@pytest.mark.parametrize("projected", [PROJECTED, Sampled(RANK)], ids=lambda codec: codec.name)
def test_projections_depend_on_seed_and_layer_alone(projected: Projected | Sampled) -> None:
    inputs, other = operands(TOKENS), operands(TOKENS)
    first = grad_of(mode_of(projected, seed=1), inputs)
    assert torch.equal(first, grad_of(mode_of(projected, seed=1), inputs))
    assert not torch.equal(first, grad_of(mode_of(projected, seed=2), inputs))
    both = mode_of(projected, seed=1)
    assert torch.equal(first, grad_of(both, inputs))
    assert not torch.equal(first, grad_of(both, other))  # equal numbers, the second layer met
    assert torch.equal(first, grad_of(both, inputs))


def test_each_step_has_a_new_projection() -> None:
    inputs = operands(TOKENS)
    functional = ProjectedLinear(PROJECTED)
    mode, made = SavedBy(functional), []
    for _ in range(3):
        made.append(grad_of(mode, inputs))
        functional.step()
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(made, 2))


def test_graphs_keep_the_projection_they_were_made_with() -> None:
    inputs = operands(TOKENS)
    functional = ProjectedLinear(PROJECTED)
    expected = grad_of(mode_of(), inputs)
    with SavedBy(functional):
        out = linear(*inputs)
    functional.step()
    grad = torch.linspace(-1, 1, out.numel()).view_as(out).sin()
    assert torch.equal(torch.autograd.grad(out, inputs[1], grad)[0], expected)


def test_layers_of_a_model_are_known_by_name() -> None:
    model, x = nn.ModuleDict({"a": nn.Linear(N, OUT), "b": nn.Linear(N, OUT)}), operands(TOKENS)[0]

    def grads(order: str, mode: SavedBy) -> dict[str, Tensor]:
        with mode:
            losses = {name: model[name](x + 0).square().sum() for name in order}
        return {name: torch.autograd.grad(loss, model[name].weight)[0] for name, loss in losses.items()}

    named = [grads(order, mode_of(model=model)) for order in ("ab", "ba")]
    assert all(torch.equal(named[0][name], named[1][name]) for name in "ab")
    met = [grads(order, mode_of()) for order in ("ab", "ba")]
    assert not torch.equal(met[0]["a"], met[1]["a"])


def storages(function: Callable[[], Any], mode: SavedBy) -> list[int]:
    """Of the projected inputs that are saved, as numbers from 0 in the order met."""
    seen: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[-1] == RANK:
            seen.append(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), mode:
        function()
    numbers = [storage._cdata for storage in seen]
    return [numbers.index(number) for number in numbers]


def test_layers_that_read_one_tensor_share_its_projection() -> None:
    x, w, b = operands(TOKENS)
    k, between, y = nn.Linear(N, OUT), nn.Linear(OUT, N), x.detach().clone()

    def read() -> None:
        q = linear(x, w, b)
        between(q)  # another layer in between, as in LoRA
        k(x)
        k(y)

    assert storages(read, mode_of()) == [0, 1, 0, 3]


def test_a_changed_tensor_is_projected_anew() -> None:
    x, w, b = operands(TOKENS)
    x = x.detach()

    def read() -> None:
        linear(x, w, b)
        x.add_(1)
        linear(x, w, b)

    assert storages(read, mode_of()) == [0, 1]


def test_tables_hold_neither_inputs_nor_weights() -> None:
    functional = ProjectedLinear(PROJECTED)
    inputs = operands(TOKENS)
    with SavedBy(functional):
        linear(*inputs)
    assert (len(functional._inputs), len(functional._names)) == (1, 1)
    del inputs
    gc.collect()
    assert (len(functional._inputs), len(functional._names)) == (0, 0)


# -- what is left alone -----------------------------------------------------------------------------------------------


def frozen(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.linear(x, w.detach(), b) + 0 * w.sum()


def computed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.linear(x, 2 * w, b)


def scaled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x, w.t(), alpha=2)


def checkpointed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return checkpoint(linear, x, w, b, use_reentrant=False)


def checkpointed_again(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return checkpoint(checkpointed, x, w, b, use_reentrant=False)


@pytest.mark.parametrize("function", [frozen, computed, scaled, checkpointed, checkpointed_again])
def test_left_alone_is_as_without(function: Callable[..., Tensor]) -> None:
    inputs = operands(TOKENS)
    out, grads = run(function, None, *inputs)
    out_c, grads_c = run(function, mode_of(), *inputs)
    assert torch.equal(out, out_c)
    assert equal(grads, grads_c) == [True, True, True]


@pytest.mark.parametrize("projected", [Projected(N), Projected(0.999), Sampled(N), Sampled(0.999)])
def test_a_rank_of_nearly_the_whole_width(projected: Projected | Sampled) -> None:
    inputs = operands(TOKENS)
    exact = grad_of(SavedBy(), inputs)
    made = grad_of(mode_of(projected), inputs)
    assert torch.equal(exact, made) == (projected.rank == N)


def test_without_gradients_and_in_transforms() -> None:
    x, w, b = operands(TOKENS)
    with mode_of():
        with torch.no_grad():
            assert torch.equal(functional.linear(x, w, b), linear(x, w, b).detach())
        grads = torch.func.grad(lambda a: functional.linear(a, w, b).sum())(x.detach())
    assert torch.equal(grads, torch.ones(TOKENS, OUT) @ w)


def test_torch_s_own_errors() -> None:
    x, w, b = operands(TOKENS)
    with mode_of():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            functional.linear(x, nn.Parameter(w.t().clone()))
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            functional.linear(x, w, b, scale=2)


def test_only_the_innermost_mode_takes_over() -> None:
    inputs = operands(TOKENS)
    inner = grad_of(mode_of(seed=2), inputs)
    with mode_of(seed=1):
        assert torch.equal(grad_of(mode_of(seed=2), inputs), inner)
        exact = grad_of(SavedBy(), inputs)
    assert torch.equal(exact, grad_of(SavedBy(), inputs))


# -- arguments --------------------------------------------------------------------------------------------------------


def test_a_rank_above_the_width_names_the_layer() -> None:
    model = nn.Sequential(nn.Linear(32, N), nn.Sequential(nn.Linear(N, 32)))
    message = r"layer '1.0' was given rank 20, but its width is 16: choose a rank from 1 to 16"
    with pytest.raises(RankError, match=message):
        ProjectedLinear(Projected(20), model=model)
    with mode_of(Projected(20)), pytest.raises(RankError, match=message.replace("1.0", "#1")):
        model(torch.randn(TOKENS, 32))
    model[1].requires_grad_(False)
    ProjectedLinear(Projected(20), model=model)  # frozen layers are not projected


def test_a_model_without_linear_layers() -> None:
    with pytest.raises(ConfigError, match="Conv2d has no linear layer"):
        ProjectedLinear(PROJECTED, model=nn.Conv2d(1, 1, 1))


# -- whole models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in ("gpt2", "bert", "t5", "llama", "lstm")], ids=str)
def test_every_other_gradient_of_a_model_is_equal(family: Any) -> None:
    torch.manual_seed(0)
    model, batch = family.make_model(), family.make_batch()
    taken = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }

    def train(mode: SavedBy) -> tuple[Tensor, dict[str, Tensor | None]]:
        torch.manual_seed(1)
        model.zero_grad()
        with mode:
            out = model(**batch) if isinstance(batch, dict) else model(*batch)
            loss = out if isinstance(out, Tensor) else out.loss
            loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    loss, exact = train(SavedBy())
    functional = ProjectedLinear(Projected(0.5, "orthonormal"), seed=key(7), model=model)
    loss_c, made = train(SavedBy(functional))
    assert torch.equal(loss, loss_c)
    differ = set()
    for name, parameter in model.named_parameters():
        if exact[name] is not None and not torch.equal(exact[name], made[name]):
            differ.add(id(parameter))
    assert differ == {number for number in taken if _has_gradient(model, number)}


def _has_gradient(model: nn.Module, number: int) -> bool:
    return any(id(p) == number and p.grad is not None and p.grad.any() for p in model.parameters())
