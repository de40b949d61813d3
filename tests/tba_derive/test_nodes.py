"""Nodes: what is put on one, so that a graph of any depth is freed without deep recursion (exact/test_deep.py)."""

from __future__ import annotations

import torch

from tba._torch.nodes import _SEAL, maker


def test_a_node_is_sealed_once_with_all_that_it_leads_to() -> None:
    x = torch.ones(3, requires_grad=True)
    h = torch.sin(x) * x
    mul = maker(h)
    assert mul is h.grad_fn
    sin, accumulate = (following for following, _ in mul.next_functions)
    assert mul.metadata[_SEAL] == ((sin, 0), (accumulate, 0))
    assert sin.metadata[_SEAL] == ((accumulate, 0),)
    assert accumulate.metadata[_SEAL] == ()
    seal = mul.metadata[_SEAL]
    assert maker(h * 2) is not None
    assert mul.metadata[_SEAL] is seal


def test_a_leaf_has_no_maker() -> None:
    assert maker(torch.ones(3)) is None
    assert maker(torch.ones(3, requires_grad=True)) is None
