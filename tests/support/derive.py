"""What the tests of derived tensors share: operands of every layout, threads and kernels, and a count of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from support.engine import save
from support.exactness import assert_bit_equal
from tba import OffloadConfig, Offloader
from tba._derive.operators import OPERATORS, Output, Scalars


def runs_of_gelu(patch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows by one whenever the engine runs a GELU again."""
    ran: list[None] = []
    known = OPERATORS["GeluBackward0"]

    def run(tensors: list[Any], scalars: Scalars, output: Output) -> Tensor:
        ran.append(None)
        return known.run(tensors, scalars, output)

    patch.setitem(OPERATORS, "GeluBackward0", known._replace(run=run))  # type: ignore[arg-type]
    return ran


def exact(tier: str = "keep") -> Offloader:
    """An engine that keeps everything in memory, and makes again what can be made."""
    return Offloader(None, OffloadConfig(tier=tier, compress="exact", min_tensor_bytes=0))


def derived_bytes(program: Callable[[], tuple[Tensor, list[Tensor]]]) -> int:
    """How many bytes of what a program saves are made again. It returns a loss, and what to differentiate it by.

    The gradients are those of plain PyTorch, to the last bit.
    """
    gradients: list[Any] = []
    with exact() as offload:
        pass
    for context in (nullcontext(), offload):
        torch.manual_seed(0)
        with context:
            loss, inputs = program()
        gradients.append(torch.autograd.grad(loss, inputs, allow_unused=True))
        del loss, inputs
    stats = offload.stats()
    offload.close()
    assert_bit_equal(gradients[1], gradients[0])
    assert stats.live_records == 0
    return stats.derived_bytes


def derived_of(function: Callable[[Tensor, Tensor], Tensor], *, beside: bool = False, **how: Any) -> tuple[int, int]:
    """The bytes that are made again where somebody saves the result of a function, and the bytes of that result.

    `beside`: somebody saves its two operands as well. The others say which operands (`operands`).
    """
    sizes = []

    def program() -> tuple[Tensor, list[Tensor]]:
        x, y = operands(**how)
        saved = [save(x), save(y)] if beside else []
        result = function(x, y)
        sizes.append(result.untyped_storage().nbytes())
        return torch.stack([each.double().sum() for each in (*saved, save(result))]).sum(), [x, y]

    return derived_bytes(program), sizes[0]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Kernels on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def mkldnn(enabled: bool) -> Iterator[None]:
    """With oneDNN's kernels or without. (`torch.backends.mkldnn.flags` warns of TF32 where there is none.)"""
    (before, *_) = torch.backends.mkldnn.set_flags(_enabled=enabled)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before)


def operands(dtype: torch.dtype = torch.float32, *, layout: str = "odd", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two tensors [rows, columns], the results of nodes that save nothing of them."""
    generator = torch.Generator().manual_seed(seed)
    # The last is more than the 32,768 elements from which on kernels use two threads.
    rows, columns = {"odd": (7, 13), "transposed": (19, 33), "broadcast": (9, 21), "strided": (11, 17)}.get(
        layout, (257, 301)
    )
    x = torch.randn(rows, columns, generator=generator)
    y = torch.randn(1 if layout == "broadcast" else rows, columns, generator=generator) + 0.1
    if layout == "transposed":
        y = y.t().contiguous().t()
    if layout == "strided":
        x = x.repeat_interleave(2, dim=1)
    x, y = x.to(dtype).requires_grad_() * 1, y.to(dtype).requires_grad_() * 1
    return (x[:, ::2] if layout == "strided" else x), y
