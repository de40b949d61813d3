"""Code of the program: which saved tensors it is given in memory of their own, and how."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from support.exactness import assert_bit_equal
from tba._record.user_code import goes_to_code
from tba._record.view import apart
from tba._torch.private import current_graph_task_id


class Asks(torch.autograd.Function):
    """x, whose backward asks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, asked: list[bool]) -> Tensor:
        ctx.asked = asked
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.asked.append(goes_to_code(current_graph_task_id(), sys._getframe()))
        return gradients[0], None


def test_code_of_a_program_is_told_from_operators_of_pytorch() -> None:
    asked: list[bool] = []

    def ask(x: Tensor) -> Tensor:
        asked.append(goes_to_code(current_graph_task_id(), sys._getframe().f_back))
        return x

    leaf = torch.ones(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, ask):
        y = leaf.exp()
        assert y.grad_fn is not None
        y.grad_fn._saved_result  # noqa: B018 - this unpacks, outside of backward
        y.sum().backward()
    assert asked == [True, False]
    Asks.apply(leaf, asked).sum().backward()
    assert asked == [True, False, True]


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x,
        lambda x: x[1:3, ::2],
        lambda x: x.t()[2:],
        lambda x: x[3].expand(5, 6),
        lambda x: x.as_strided((3, 3), (2, 1), 5),
        lambda x: torch.view_as_complex(x[1:, :2]).conj(),
        lambda x: torch.view_as_complex(x[1:, :2]).conj().imag,
        lambda x: x.view(torch.int32)[2],
    ],
)
def test_memory_of_its_own_looks_the_same(look: Any) -> None:
    x = torch.randn(4, 6)
    view = look(x)
    copy = apart(view)
    assert_bit_equal(copy, view)
    assert (copy.storage_offset(), copy.is_conj(), copy.is_neg()) == (
        view.storage_offset(),
        view.is_conj(),
        view.is_neg(),
    )
    assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
