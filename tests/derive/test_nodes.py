"""Nodes: graphs of any depth are looked at, and freed, without deep recursion."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tba._torch.nodes import _SEAL, maker

DEEP, STACK_BYTES = 2000, 1 << 19  # with a stack of the usual 8 MiB it takes sixteen times as many

PROGRAM = """
import gc, sys
import torch
from tba import offload_context

settings, scratch, deep = sys.argv[1], sys.argv[2], int(sys.argv[3])
compress, tier = settings.split("/")

def run(depth):
    leaf = torch.full((8,), 0.5, requires_grad=True)
    h = leaf * 1
    for _ in range(depth):
        h = -(torch.sin(h) * h)
    return leaf, h

with offload_context(tier=tier, compress=compress, min_tensor_bytes=0, storage_paths=[scratch]) as offload:
    leaf, h = run(deep)
h.sum().backward()
if compress == "exact":
    ours = leaf.grad.clone()
    del h, leaf
    plain, h = run(deep)
    h.sum().backward()
    assert torch.equal(ours, plain.grad), (ours, plain.grad)
del h
with offload:
    _, dropped = run(deep)
del dropped, _
gc.collect()
assert offload.stats().live_records == 0, offload.stats()
assert offload.stats().derived_bytes > deep * 8 * 4
print("freed")
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("settings", ["exact/nvme", "exact/keep", "safe8/nvme", "safe8/keep"])
def test_a_deep_graph_under_compress_is_freed(settings: str, scratch: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, settings, str(scratch), str(DEEP)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES)),
    )
    assert (child.returncode, child.stdout[:5]) == (0, "freed"), child.stderr[-3000:]


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
