"""Cases: what training code does to saved tensors. A case gets a peer's wrapper and returns gradients.

Plain PyTorch, which wraps nothing, gives the right ones.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from .._workload.accelerator import in_use
from .peer import Function, Wrapper

Leaf = Callable[[int], Tensor]
Case = Callable[[Wrapper, Path, Leaf], Sequence[Tensor | None]]
_SIDE = 512  # of square matrices: 1 MiB each
# Number of graphs dropped, and the MiB that each saves; a peer that still holds half of them leaks.
_DROPPED, _DROPPED_MIB = 8, 8
_STRETCH = 256 << 10  # of which 4 KiB are overwritten
_WRITING_S = 0.5  # until everything that a peer writes in the background is in its file


class NotTried(Exception):
    """A case could not do what it tests to this peer."""


def as_it_is(function: Function) -> Function:
    """Wrap nothing: plain PyTorch."""
    return function


def leaf_on(device: torch.device) -> Leaf:
    """Return the maker of leaves: random square matrices, the same for the same seed."""

    def leaf(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(_SIDE, _SIDE, generator=generator).div_(8).to(device).requires_grad_()

    return leaf


def _through(wrap: Wrapper, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call a wrapped function with an activation made from the leaf `x`, as in a model."""
    out: Tensor = wrap(function)(x * 1.0)
    return out


def views(wrap: Wrapper, scratch: Path, leaf: Leaf) -> Sequence[Tensor | None]:
    """Several views of one storage are saved: halves, a transpose, a slice that starts inside."""

    def function(x: Tensor) -> Tensor:
        base = x * 2
        upper, lower = base.chunk(2)
        return (upper * lower).sum() + (base.t() @ base).sin().sum() + base[1:].square().sum() + base[:, 3].exp().sum()

    x = leaf(0)
    _through(wrap, function, x).backward()
    return [x.grad]


def repeated(wrap: Wrapper, scratch: Path, leaf: Leaf) -> Sequence[Tensor | None]:
    """One tensor is saved by several operators, and by one operator twice."""

    def function(x: Tensor) -> Tensor:
        y = x * 2
        return (y * y).sum() + (y @ y).sin().sum() + y.exp().sum() + (y * x).sum()

    x = leaf(0)
    _through(wrap, function, x).backward()
    return [x.grad]


def retained(wrap: Wrapper, scratch: Path, leaf: Leaf) -> Sequence[Tensor | None]:
    """Backward runs twice over one graph: retain_graph=True."""
    x = leaf(0)
    out = _through(wrap, lambda x: (x * 2).exp().square().sum(), x)
    out.backward(retain_graph=True)
    out.backward()
    return [x.grad]


def double_backward(wrap: Wrapper, scratch: Path, leaf: Leaf) -> Sequence[Tensor | None]:
    """The gradient is differentiated again: create_graph=True."""
    x = leaf(0)
    out = _through(wrap, lambda x: (x * 2).exp().mul(x).sum(), x)
    [gradient] = torch.autograd.grad(out, x, create_graph=True)
    gradient.square().sum().backward()
    return [x.grad]


class _Twice(torch.autograd.Function):
    """exp, whose backward reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.exp()
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (ctx.saved_tensors[1] + ctx.saved_tensors[0] * 0)


def read_twice(wrap: Wrapper, scratch: Path, leaf: Leaf) -> Sequence[Tensor | None]:
    """A custom Function reads `ctx.saved_tensors` twice."""
    x = leaf(0)
    _through(wrap, lambda x: _Twice.apply(x * 2).square().sum(), x).backward()
    return [x.grad]


def two_forwards(wrap: Wrapper, scratch: Path, leaf: Leaf) -> Sequence[Tensor | None]:
    """Two forwards precede the first backward, as in a pipeline."""
    function = wrap(lambda x: (x * 2).exp().square().sum())
    first, second = leaf(0), leaf(1)
    outs = function(first * 1.0), function(second * 1.0)
    for out in outs:
        out.backward()
    return [first.grad, second.grad]


def edited(wrap: Wrapper, scratch: Path, leaf: Leaf) -> Sequence[Tensor | None]:
    """A saved tensor is edited in place before backward, which plain PyTorch refuses."""
    x = leaf(0)
    hidden = x * 2
    out = wrap(lambda hidden: hidden.square().sum())(hidden)
    hidden.add_(1)
    out.backward()
    return [x.grad]


def unedited(wrap: Wrapper, scratch: Path, leaf: Leaf) -> Sequence[Tensor | None]:
    """The gradients of `edited` without the edit, which are right too."""
    x = leaf(0)
    wrap(lambda hidden: hidden.square().sum())(x * 2).backward()
    return [x.grad]


def vanished(wrap: Wrapper, scratch: Path, leaf: Leaf) -> Sequence[Tensor | None]:
    """What was written is gone before backward: files are deleted, and unnamed ones truncated."""
    return _spoiled(wrap, scratch, leaf, lambda descriptor: os.ftruncate(descriptor, 0), unlink=True)


def changed(wrap: Wrapper, scratch: Path, leaf: Leaf) -> Sequence[Tensor | None]:
    """The disk returns other bytes than were written: some bytes of each file are overwritten."""

    def spoil(descriptor: int) -> None:
        for offset in range(_STRETCH // 2, os.fstat(descriptor).st_size, _STRETCH):
            os.pwrite(descriptor, b"\x11" * 4096, offset)

    return _spoiled(wrap, scratch, leaf, spoil, unlink=False)


def _spoiled(
    wrap: Wrapper, scratch: Path, leaf: Leaf, spoil: Callable[[int], None], *, unlink: bool
) -> Sequence[Tensor | None]:
    x = leaf(0)

    def function(x: Tensor) -> Tensor:
        for _ in range(6):
            x = (x * 1.5).sin()
        return x.sum()

    out = _through(wrap, function, x)
    time.sleep(_WRITING_S)
    files = _files(scratch)
    if wrap is not as_it_is and not any(path.stat().st_size for path in files):
        raise NotTried("nothing was written that could be changed")
    for path in files:
        descriptor = os.open(path, os.O_RDWR)
        spoil(descriptor)
        os.close(descriptor)
        if unlink and path.is_relative_to(scratch):
            path.unlink()
    out.backward()
    return [x.grad]


def _files(scratch: Path) -> list[Path]:
    """Find the files of this process below a folder: by name, and unnamed ones by their descriptors."""
    named = [path for path in scratch.rglob("*") if path.is_file()]
    descriptors = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    nameless = [path for path in descriptors if _nameless(path) and os.readlink(path).startswith(str(scratch))]
    return named + nameless


def _nameless(path: Path) -> bool:
    try:
        return os.readlink(path).endswith(" (deleted)")
    except OSError:  # the descriptor of the listing itself
        return False


def dropped(wrap: Wrapper, scratch: Path, leaf: Leaf) -> Sequence[Tensor | None]:
    """Graphs are dropped without a backward; then one step is taken.

    Raises:
        MemoryError: what they saved is still in memory or on the disk.
    """

    def function(x: Tensor) -> Tensor:
        for _ in range(_DROPPED_MIB):
            x = (x * 1.5).exp().sin()
        return x.sum()

    x = leaf(0)
    _through(wrap, function, x).backward()
    x.grad = None
    gc.collect()
    before = _resident_bytes()
    for _ in range(_DROPPED):
        _through(wrap, function, x)
    gc.collect()
    held = _resident_bytes() - before
    filed = sum(path.stat().st_blocks * 512 for path in _files(scratch))
    half = _DROPPED * _DROPPED_MIB << 19
    if held >= half or filed >= half:
        raise MemoryError(f"dropped graphs hold {held >> 20} MiB in memory and {filed >> 20} MiB in files")
    _through(wrap, function, x).backward()
    return [x.grad]


def _resident_bytes() -> int:
    card = in_use()
    return int(psutil.Process().memory_info().rss) + (int(card.memory_allocated()) if card else 0)


CASES: dict[str, Case] = {
    "views of one storage": views,
    "one tensor saved often": repeated,
    "retain_graph, twice": retained,
    "double backward": double_backward,
    "saved_tensors read twice": read_twice,
    "two forwards first": two_forwards,
    "edit before backward": edited,
    "file vanishes": vanished,
    "bytes change on disk": changed,
    "graph dropped": dropped,
}
OF_FILES = ("file vanishes", "bytes change on disk")
