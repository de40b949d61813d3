"""Every operator of PyTorch's own database that has a gradient: through the file, its gradients are the same to the bit.

Each sample runs twice plainly (an operator that is not deterministic against itself proves nothing) and once through
the engine, from the same seed: inputs made non-leaf, forward, `flush()`, backward with a fixed random gradient. How
much autograd saves is counted independently of the engine, so that "nothing was moved" cannot pass for "exact".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Observer, assert_adds_up, assert_bit_equal, difference
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from tba import offload_context

pytestmark = [
    # Many operators save nothing, or nothing that can be moved; whether that is so is asserted below.
    pytest.mark.filterwarnings("ignore:tier='nvme' moved nothing:tba.OffloadWarning"),
    # Raised once per process by plain PyTorch.
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:dropout2d. Received a :UserWarning"),
    pytest.mark.filterwarnings("ignore:`nn.functional.upsample_(nearest|bilinear)` is deprecated:UserWarning"),
]

_SAMPLES = 20
_MAX_ELEMENTS = 20_000
_GRADIENT_SEED = 11
_DTYPES = (torch.float32, torch.complex64, torch.float64, torch.complex128, torch.bfloat16, torch.float16)


def _dtype(op: OpInfo) -> torch.dtype | None:
    supported = op.supported_backward_dtypes("cpu")
    return next((dtype for dtype in _DTYPES if dtype in supported), None)


def _name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPS = [op for op in op_db if op.supports_autograd and _dtype(op) is not None]
# Found in the database with a gradient but without a dtype on the CPU.
NOT_ON_THE_CPU = {_name(op) for op in op_db if op.supports_autograd and _dtype(op) is None}

# Why tensors stay in memory: the reason the engine gives, for each operator where it happens.
KEPT: dict[str, set[str]] = {}

# What cannot be compared: the plain run of each of its samples differs from itself, or raises.
NOT_COMPARABLE: dict[str, str] = {}


def _samples(op: OpInfo) -> Iterator[SampleInput]:
    torch.manual_seed(3)
    samples = op.sample_inputs("cpu", _dtype(op), requires_grad=True)
    small = (s for s in samples if sum(t.numel() for t in _leaves(s)) <= _MAX_ELEMENTS)
    return itertools.islice(small, _SAMPLES)


def _leaves(sample: SampleInput) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(leaf, Tensor)]


def _non_leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.requires_grad and value.layout is torch.strided:
        return value * 1
    return value


def _forward(op: OpInfo, sample: SampleInput) -> list[Tensor]:
    """The outputs that have a gradient, of inputs that are no leaves."""
    torch.manual_seed(5)
    first, args, kwargs = tree_map(_non_leaf, (sample.input, sample.args, sample.kwargs))
    out = sample.output_process_fn_grad(op(first, *args, **kwargs))
    return [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]


def _backward(outputs: list[Tensor], sample: SampleInput) -> list[Tensor | None]:
    inputs = [leaf for leaf in _leaves(sample) if leaf.requires_grad]
    generator = torch.Generator().manual_seed(_GRADIENT_SEED)
    gradients = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in outputs]
    return list(torch.autograd.grad(outputs, inputs, gradients, allow_unused=True))


def _plain(op: OpInfo, sample: SampleInput, observer: Observer | None = None) -> tuple[list[Tensor], Any]:
    with observer if observer is not None else nullcontext():
        outputs = _forward(op, sample)
    return [t.detach().clone() for t in outputs], _backward(outputs, sample)


@pytest.mark.parametrize("op", OPS, ids=_name)
def test_operator_is_exact_through_the_file(op: OpInfo, scratch: Path) -> None:
    compared = 0
    seen = Observer()
    excuses: list[str] = []
    offload = offload_context(tier="nvme", min_tensor_bytes=0, storage_paths=scratch)
    try:
        for number, sample in enumerate(_samples(op)):
            try:
                expected = _plain(op, sample)
                again = _plain(op, sample)
            except Exception as error:  # plain PyTorch cannot do it: nothing to compare with
                excuses.append(f"plain raises {type(error).__name__}: {error}")
                continue
            if unstable := difference(list(again), list(expected)):
                excuses.append(f"plain differs from plain: {unstable}")
                continue
            _plain(op, sample, seen)
            with offload:
                outputs = _forward(op, sample)
            offload.flush()
            actual = [t.detach().clone() for t in outputs], _backward(outputs, sample)
            del outputs
            assert_bit_equal(list(actual), list(expected), f"sample {number}:")
            compared += 1
        stats = offload.stats()
    finally:
        offload.close()
    if not compared:
        assert _name(op) in NOT_COMPARABLE, excuses
        pytest.skip(f"{NOT_COMPARABLE[_name(op)]}: {excuses[0] if excuses else 'no samples'}")
    assert_adds_up(stats)
    assert stats.forwarded_bytes == 0
    assert set(stats.kept_by_reason) <= KEPT.get(_name(op), set()), stats.kept_by_reason
    assert (stats.offloaded_bytes > 0) == (seen.others > 0), (seen.others, stats)
    assert stats.written_bytes >= stats.offloaded_bytes, stats
    assert stats.read_bytes >= stats.offloaded_bytes, stats
