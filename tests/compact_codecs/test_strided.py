"""Layout: which elements of a strided tensor are stored, and how they come back."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compact import Spec
from compact._codecs.strided import Target, flat, shares_memory, stored
from support.exactness import assert_bit_equal
from support.samples import examples

LAYOUTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 13)), max_size=4)


def offsets(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Where each element lies, one by one."""
    return [sum(map(math.prod, zip(i, stride, strict=True))) for i in itertools.product(*map(range, shape))]


@settings(max_examples=examples(300), deadline=None)
@given(LAYOUTS)
def test_any_strides_come_back(dims: list[tuple[int, int]]) -> None:
    shape, stride = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    memory = torch.arange(300.0)
    tensor = memory.as_strided(shape, stride, 7)
    spec = Spec.of(tensor)
    values = flat(tensor)
    assert values.shape == (spec.stored_numel,)
    target = Target(spec, tensor.device)
    target.flat.copy_(values)
    assert_bit_equal(target.tensor(), tensor)


@settings(max_examples=examples(300), deadline=None)
@given(LAYOUTS)
def test_each_place_is_stored_once_in_the_order_of_memory(dims: list[tuple[int, int]]) -> None:
    shape, stride = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    places, kept = offsets(shape, stride), offsets(*stored(shape, stride))
    assert kept == sorted(set(kept))
    assert set(places) <= set(kept)
    if set(places) != set(kept):  # more is stored only where windows overlap
        assert shares_memory(shape, stride)
        assert kept == list(range(max(places) + 1))
    if len(set(places)) < len(places):
        assert shares_memory(shape, stride)


@settings(max_examples=examples(200), deadline=None)
@given(LAYOUTS)
def test_logical_order_keeps_strides_unless_elements_share_memory(dims: list[tuple[int, int]]) -> None:
    shape, stride = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    tensor = torch.arange(300.0).as_strided(shape, stride, 7)
    values = flat(tensor, logical=True)
    assert torch.equal(values, tensor.reshape(-1))
    target = Target(Spec.of(tensor), tensor.device, logical=True)
    target.flat.copy_(values)
    back = target.tensor()
    assert torch.equal(back, tensor)
    assert back.stride() == (torch.empty(shape).stride() if shares_memory(shape, stride) else stride)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_dense_tensor_is_stored_and_restored_without_a_copy(order: tuple[int, ...]) -> None:
    tensor = torch.arange(60).view(3, 4, 5).permute(order)
    assert flat(tensor).data_ptr() == tensor.data_ptr()
    target = Target(Spec.of(tensor), tensor.device)
    assert target.flat.data_ptr() == target.tensor().data_ptr()


def test_sizes_of_a_spec() -> None:
    spec = Spec.of(torch.zeros(1, 6, dtype=torch.bfloat16).expand(5, 6))
    assert (spec.numel, spec.stored_numel, spec.stored_bytes) == (30, 6, 12)
