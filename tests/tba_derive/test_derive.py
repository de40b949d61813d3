"""Derived tensors: each operator again bit for bit, what is refused, and how far a chain goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support.derive import derived_bytes, derived_of, exact, operands, threads
from support.engine import save
from support.models import Looks
from tba._derive.operators import OPERATORS, RESULTS, same_bits
from tba._derive.search import MAX_OPERATORS, recipe, remember

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


LAYOUTS = pytest.mark.parametrize("layout", ["odd", "transposed", "broadcast", "strided", "large"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
THREADS = ((1,), (1, 2))  # kernels use a second thread for large tensors only


@pytest.mark.sampled(100)
@LAYOUTS
@DTYPES
@pytest.mark.parametrize("name", DIRECT)
def test_an_operator_that_saves_its_operands_is_run_again(name: str, dtype: torch.dtype, layout: str) -> None:
    for count in THREADS[layout == "large"]:
        with threads(count):
            made, nbytes = derived_of(DIRECT[name], dtype=dtype, layout=layout)
        assert made == nbytes


@pytest.mark.sampled(100)
@LAYOUTS
@DTYPES
@pytest.mark.parametrize("name", INDIRECT)
def test_an_operator_whose_operands_others_saved_is_run_again(name: str, dtype: torch.dtype, layout: str) -> None:
    for count in THREADS[layout == "large"]:
        with threads(count):
            made, nbytes = derived_of(INDIRECT[name], beside=True, dtype=dtype, layout=layout)
            assert made == nbytes
            assert derived_of(INDIRECT[name], dtype=dtype, layout=layout)[0] == 0


def test_every_operator_of_the_table_is_met() -> None:
    seen = {f"Native{name}NormBackward0" for name in ("Layer", "Group", "Batch")}  # have tests of their own

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
    ("function", "derives"),
    [
        (lambda x, y: x * y, True),
        (lambda x, y: x / y, True),
        (lambda x, y: x * y.detach(), False),  # only y is saved: x is not needed for anybody's gradient
        (lambda x, y: x.detach() * y, False),
        (lambda x, y: x / y.detach(), False),
        (lambda x, y: x.detach() / y, False),  # both are saved, but the one has no node that tells of an edit
        (lambda x, y: 1 + x, False),
        (lambda x, y: 3.0 / x, True),  # 3 * (the reciprocal, which its node saves)
    ],
)
def test_what_a_node_saves_decides_whether_its_result_is_made_again(function: Function, derives: bool) -> None:
    made, nbytes = derived_of(function)
    assert made == (nbytes if derives else 0)


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
def test_a_result_its_own_node_saves_is_stored_and_others_follow_from_it(function: Callable[[Tensor], Tensor]) -> None:
    def result(x: Tensor, y: Tensor) -> Tensor:
        made = function(x.abs().detach().requires_grad_())
        assert made.grad_fn is not None
        assert made.grad_fn.name() in RESULTS
        return made

    assert derived_of(result)[0] == 0
    made, nbytes = derived_of(lambda x, y: result(x, y) * 2)
    assert made == nbytes


def test_neither_a_result_of_its_own_node_nor_an_edited_tensor_has_a_recipe() -> None:
    def unpack(packed: Tensor) -> Tensor:
        return packed

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        x = operands()[0]
        assert recipe(x.exp(), unpack) is None
        remember(x, unpack, lambda: x.detach())
        assert recipe(-x, unpack) is not None
        edited = (x * 1).add_(1)
        remember(edited, unpack, lambda: edited.detach())
        assert recipe(-edited, unpack) is None


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.ones(3, requires_grad=True),
        lambda x, y: (x.detach() * 2).requires_grad_(),
        lambda x, y: Looks.apply(x, lambda *_: None),
        lambda x, y: x @ y.t(),
        lambda x, y: (x * y).add_(1),
        lambda x, y: functional.silu(x * 1, inplace=True),
        lambda x, y: (x * y).as_subclass(Subclass),
        lambda x, y: (x.to(torch.complex64) * y).real,
        lambda x, y: (x @ y.t()) * 2,
    ],
)
def test_what_cannot_be_made_again_is_stored(function: Function) -> None:
    assert derived_of(function)[0] == 0


def test_what_another_engine_has_packed_is_not_used() -> None:
    ours, theirs = exact(), exact()
    with theirs:
        product = torch.mul(*operands())
    plain = torch.mul(*operands())
    for tensor, derives in ((product, False), (plain, False)):
        with ours:
            kept = save(tensor)
        assert (ours.stats().derived_bytes > 0) is derives
        del kept
    with theirs:
        kept = save(product)
    assert theirs.stats().derived_bytes == product.nbytes
    del kept
    for offload in (ours, theirs):
        offload.close()


def test_a_torch_that_has_renamed_something_derives_less(monkeypatch: pytest.MonkeyPatch) -> None:
    functions: dict[str, Function] = {
        "PowBackward0": lambda x, y: x.pow(3),
        "NativeLayerNormBackward0": lambda x, y: functional.layer_norm(x, (13,)),
    }
    changes = [
        ("PowBackward0", {"scalars": ("gone",)}),
        ("NativeLayerNormBackward0", {"operands": ("input", "gone", "bias"), "optional": ("gone", "bias")}),
        ("NativeLayerNormBackward0", {"extras": ("result1", "gone")}),
    ]
    for name, change in changes:
        assert derived_of(functions[name])[0] > 0
        with monkeypatch.context() as patch:
            patch.setitem(OPERATORS, name, OPERATORS[name]._replace(**change))
            assert derived_of(functions[name])[0] == 0


def test_results_of_foreign_nodes_are_operands_too() -> None:
    made, nbytes = derived_of(lambda x, y: Looks.apply(x, lambda *_: None) * y)
    assert made == nbytes


def test_same_bits_sees_payloads_signs_and_types() -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, nan.flip(0))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(1))
    assert same_bits(torch.zeros(2, 3).t(), torch.zeros(3, 2))


# -- chains ----------------------------------------------------------------------------------------------------------


def test_operands_nobody_saved_are_made_again_in_their_turn() -> None:
    made, nbytes = derived_of(
        lambda x, y: (x.float() * torch.rsqrt(y.float().abs())).to(torch.bfloat16), dtype=torch.bfloat16
    )
    assert made >= nbytes


@pytest.mark.parametrize(("operators", "derives"), [(MAX_OPERATORS, True), (MAX_OPERATORS + 1, False)])
def test_a_chain_of_too_many_operators_is_stored(operators: int, derives: bool) -> None:
    def chain(x: Tensor, y: Tensor) -> Tensor:
        tensor = x * y
        for _ in range(operators - 1):
            tensor = -tensor
        return tensor

    assert bool(derived_of(chain)[0]) is derives


def test_of_a_chain_of_which_each_is_saved_each_fifth_is_stored() -> None:
    length = 23

    def program() -> tuple[Tensor, list[Tensor]]:
        x = result = operands()[0]
        for _ in range(length):
            result = functional.silu(result)
        return result.sum(), [x]

    saved = length - 1  # the first is x; the last nobody saves
    assert derived_bytes(program) == (saved - saved // (MAX_OPERATORS + 1)) * operands()[0].nbytes
