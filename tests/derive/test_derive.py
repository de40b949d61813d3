"""Recipes: each operator again bit for bit, what is refused, and how far a chain goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support.derive import Harness, check, derive, operands, threads
from support.engine import save
from support.models import Looks
from tba._derive.operators import OPERATORS, RESULTS
from tba._derive.search import MAX_OPERATORS, recipe

Function = Callable[[Tensor, Tensor], Tensor]

# Their nodes save the operands.
DIRECT: dict[str, Function] = {
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "pow": lambda x, y: x.pow(3.0),
    "pow, fraction": lambda x, y: x.pow(0.3),  # NaN where x < 0
    "square": lambda x, y: x.square(),
    "abs": lambda x, y: x.abs(),
    "silu": lambda x, y: functional.silu(x),
    "gelu": lambda x, y: functional.gelu(x),
    "gelu, tanh": lambda x, y: functional.gelu(x, approximate="tanh"),
    "softplus": lambda x, y: functional.softplus(x, beta=2.0, threshold=1.5),
    "leaky_relu": lambda x, y: functional.leaky_relu(x, 0.2),
    "hardswish": lambda x, y: functional.hardswish(x),
    "mish": lambda x, y: functional.mish(x),
}
# Theirs do not: somebody else must have.
INDIRECT: dict[str, Function] = {
    "add": lambda x, y: x + y,
    "add, alpha": lambda x, y: torch.add(x, y, alpha=0.3),
    "sub": lambda x, y: x - y,
    "sub, alpha": lambda x, y: torch.sub(x, y, alpha=3),
    "neg": lambda x, y: -x,
    "mul by a number": lambda x, y: x * 0.1,
    "div by a number": lambda x, y: x / 3,
    "dropout": lambda x, y: functional.dropout(x, 0.5),
    "to float16": lambda x, y: (-x).to(torch.float16),
    "to float64": lambda x, y: x.to(torch.float64),
    "clone": lambda x, y: x.clone(),
    "view": lambda x, y: -x.clone().view(-1),
    "t": lambda x, y: -x.t(),
    "transpose": lambda x, y: x.transpose(-1, 0).contiguous(),
    "permute": lambda x, y: -x.permute(1, 0),
    "expand": lambda x, y: x.unsqueeze(1).expand(-1, 3, -1).reshape(-1, x.shape[-1]),
    "squeeze": lambda x, y: -x.unsqueeze(0).squeeze(0),
    "squeeze all": lambda x, y: -x.unsqueeze(0).squeeze(),
    "squeeze some": lambda x, y: -x[None, None].squeeze((0, 1)),
    "select": lambda x, y: -x[2],
    "slice": lambda x, y: -x[1:-1, ::2],
    "narrow": lambda x, y: -x.narrow(-1, 1, 3),
    "chunk": lambda x, y: -x.chunk(2, -1)[1],
    "split, sizes": lambda x, y: -x.split([1, x.shape[-1] - 1], -1)[1],
    "unbind": lambda x, y: -x.unbind(-1)[-1],
    "unsafe view": lambda x, y: torch.ops.aten._unsafe_view(-x, [-1]),
}


THREADS = ((1,), (1, 2))  # kernels use a second thread for large tensors only


@pytest.mark.sampled(100)
@pytest.mark.parametrize("layout", ["odd", "transposed", "broadcast", "strided", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", DIRECT)
def test_an_operator_that_saves_its_operands(name: str, dtype: torch.dtype, layout: str) -> None:
    for count in THREADS[layout == "large"]:
        harness = Harness(siblings=False)
        with threads(count), harness.hooks():
            made = check(harness, DIRECT[name](*operands(dtype, layout=layout)))
        assert made.depth == 1


@pytest.mark.sampled(100)
@pytest.mark.parametrize("layout", ["odd", "transposed", "broadcast", "strided", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", INDIRECT)
def test_an_operator_whose_operands_others_saved(name: str, dtype: torch.dtype, layout: str) -> None:
    for count in THREADS[layout == "large"]:
        harness = Harness()
        with threads(count), harness.hooks():
            x, y = operands(dtype, layout=layout)
            unknown = INDIRECT[name](x, y)
            consumers = save(x), save(y)
            tensor = INDIRECT[name](x, y)
            check(harness, tensor)
        del consumers
        assert derive(Harness(siblings=False), unknown) is None


def test_every_operator_of_the_table_is_met() -> None:
    seen = {"NativeLayerNormBackward0"}  # has tests of its own

    def walk(node: Any) -> None:
        if node is not None:
            seen.add(node.name())
            for above, _ in node.next_functions:
                walk(above)

    for function in (DIRECT | INDIRECT).values():
        walk(function(*operands()).grad_fn)
    # torch 2.13 makes none of these on its own: they are what `reshape` left in older graphs.
    assert set(OPERATORS) - seen == {"ReshapeAliasBackward0"}


@pytest.mark.parametrize(
    ("function", "source_count"),
    [
        (lambda x, y: x * y, 2),
        (lambda x, y: x * x, 2),
        (lambda x, y: x / y, 2),
        (lambda x, y: x * y.detach(), None),  # only y is saved: x is not needed for anybody's gradient
        (lambda x, y: x.detach() * y, None),
        (lambda x, y: x / y.detach(), None),
        (lambda x, y: x.detach() / y, 2),  # the divisor's gradient needs both
        (lambda x, y: 1 + x, None),
        (lambda x, y: 3.0 / x, 1),  # 3 * (the reciprocal, which its node saves)
    ],
)
def test_which_operands_a_node_saves(function: Function, source_count: int | None) -> None:
    harness = Harness(siblings=False)
    with harness.hooks():
        tensor = function(*operands())
        if source_count is None:
            assert derive(harness, tensor) is None
        else:
            assert len(check(harness, tensor).sources) == source_count


@pytest.mark.parametrize(
    "function",
    [
        *(torch.relu, torch.tanh, torch.sigmoid, torch.exp, torch.rsqrt, torch.sqrt, torch.reciprocal),
        lambda x: x.softmax(-1),
        lambda x: x.log_softmax(-1),
        lambda x: torch._safe_softmax(x, -1),
        lambda x: functional.scaled_dot_product_attention(*[x[None, None]] * 3),
    ],
)
def test_a_result_its_own_node_saves_is_a_source_and_never_derived(function: Callable[[Tensor], Tensor]) -> None:
    harness = Harness(siblings=False)
    with harness.hooks():
        result = function(operands()[0].abs())
        assert result.grad_fn.name() in RESULTS
        assert derive(harness, result) is None
        check(harness, result * 2)
    assert harness.derived_bytes.keys() <= {"AbsBackward0"}  # of which some are saved as inputs


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.randn(3, requires_grad=True),
        lambda x, y: x.detach() * 2,
        lambda x, y: Looks.apply(x, print),
        lambda x, y: x @ y.t(),
        lambda x, y: (x * y).add_(1),
        lambda x, y: (x * y)[0].add_(1)._base,
        lambda x, y: functional.silu(x * 1, inplace=True),
        lambda x, y: (x * y).as_subclass(Subclass),
        lambda x, y: x.to(torch.complex64) * y,
        lambda x, y: (x @ y.t()) * 2,
    ],
)
def test_what_cannot_be_derived_is_refused(function: Function) -> None:
    harness = Harness(siblings=False)
    with harness.hooks():
        assert derive(harness, function(*operands())) is None


def test_only_this_hooks_packed_objects_are_used() -> None:
    ours, theirs = Harness(), Harness()
    with theirs.hooks():
        product = torch.mul(*operands())
    plain = torch.mul(*operands())
    assert derive(ours, product) is None
    assert derive(ours, plain) is None
    check(theirs, product)


def test_nothing_is_unpacked_before_compute() -> None:
    asked: list[Tensor] = []

    def unpack(tensor: Tensor) -> Tensor:
        asked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        x, y = operands()
        made = recipe(functional.layer_norm(functional.gelu(x, approximate="tanh") * y, (13,)), unpack)
        assert made is not None
    assert not asked
    settled, _ = made.settled(lambda packed, operand: (packed, operand))
    assert {id(tensor) for tensor in asked} == {id(source) for source in made.sources}
    asked.clear()
    settled.compute()
    assert [id(tensor) for tensor in asked] == [id(source) for source in settled.sources]


def test_a_torch_that_has_renamed_something_derives_less(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(siblings=False)
    with harness.hooks():
        x = operands()[0]
        cubed, norm = x.pow(3), functional.layer_norm(x, (13,))
    check(harness, cubed)
    for name, changes in {
        "PowBackward0": [{"scalars": ("gone",)}, {"operands": ("gone",)}],
        "NativeLayerNormBackward0": [
            {"operands": ("input", "gone", "bias"), "optional": ("gone", "bias")},
            {"extras": ("result1", "gone")},
        ],
    }.items():
        for change in changes:
            with monkeypatch.context() as patch:
                patch.setitem(OPERATORS, name, OPERATORS[name]._replace(**change))
                assert derive(harness, cubed if name == "PowBackward0" else norm) is None


def test_results_of_foreign_nodes_are_operands_too() -> None:
    harness = Harness()
    with harness.hooks():
        x, y = Looks.apply(operands()[0], print), operands()[1]
        product = x * y
        check(harness, product)
        check(harness, -x)  # the product saved it


# -- links, depth, termination ---------------------------------------------------------------------------------------


def test_operands_nobody_saved_are_derived_in_their_turn() -> None:
    harness = Harness(siblings=False)
    with harness.hooks():
        x, y = operands(torch.bfloat16)
        made = check(harness, (x.float() * torch.rsqrt(y.float().abs())).to(torch.bfloat16))
    assert made.depth == 2


def test_a_chain_of_too_many_operators_is_refused() -> None:
    harness = Harness(siblings=False)
    with harness.hooks():
        tensor = torch.mul(*operands())
        for _ in range(MAX_OPERATORS - 1):
            tensor = -tensor
        assert check(harness, tensor).depth == MAX_OPERATORS
        assert derive(harness, -tensor) is None


def test_recipes_upon_recipes_end_after_a_bounded_number_of_operators() -> None:
    harness = Harness(siblings=False)
    length = 23
    with harness.hooks():
        x = operands()[0]
        result = x
        for _ in range(length):
            result = functional.silu(result)
    made = [reference() for reference in harness.recipes]
    assert [one.depth for one in made] == [1, 2, 3, 4] * 4 + [
        1,
        2,
    ]  # each fifth is kept; the first is x, the last unsaved
    result.sum().backward()
    assert harness.computed <= length * MAX_OPERATORS
