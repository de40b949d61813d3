"""A saver that keeps everything in memory and makes again what can be made: the harness of the tests of recipes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from support.exactness import assert_bit_equal
from tba._derive.operators import same_bits
from tba._derive.search import Recipe, recipe, remember
from tba._torch.weights import leads_to_parameter

_MARK = "_derive_test_mark"


class Kept:
    """One storage's tensor: itself, or how to make it again. Graphs hold it, nothing else does."""

    def __init__(self, tensor: Tensor, made: Recipe | None) -> None:
        self.tensor = None if made is not None else tensor.detach()
        self.recipe = made
        self.version = tensor._version
        self.offset = tensor.storage_offset()


Packed = tuple[Kept, tuple[Any, ...]]


class Harness:
    """Pack and unpack hooks. Everything derivable is dropped at once if its recipe gives its bits.

    Attributes:
        kept_bytes, derived_bytes: of distinct storages that are no weights, by the name of the node that made them.
        weight_bytes: saved of weights.
        refused: recipes that did not give the bits, by the name of the node.
        computed: how often a recipe was run in unpack.
        recipes, all_kept: every recipe and every storage's `Kept`, for as long as a graph holds them.
    """

    def __init__(self, siblings: bool = True) -> None:
        self.kept_bytes: Counter[str] = Counter()
        self.derived_bytes: Counter[str] = Counter()
        self.weight_bytes = 0
        self.refused: Counter[str] = Counter()
        self.computed = 0
        self.recipes: list[weakref.ref[Recipe]] = []
        self.all_kept: list[weakref.ref[Kept]] = []
        self._siblings = siblings

    def pack(self, tensor: Tensor) -> Packed:
        base = tensor._base
        root = base if type(base) is Tensor else tensor
        view = (tensor.size(), tensor.stride(), tensor.storage_offset())
        node = tensor.grad_fn
        if (
            isinstance(tensor, nn.Parameter)
            or isinstance(base, nn.Parameter)
            or (node is not None and leads_to_parameter(node))
        ):
            self.weight_bytes += tensor.nbytes
            return Kept(tensor, None), view
        storage = root.untyped_storage()
        reference, version = getattr(storage, _MARK, (lambda: None, -1))
        kept = reference()
        if kept is None or version != root._version:
            kept = self._keep(root)
            self.all_kept.append(weakref.ref(kept))
            setattr(storage, _MARK, (weakref.ref(kept), root._version))
        if self._siblings:
            remember(tensor, self.unpack, _Weak(kept, view))
        return kept, view

    def _keep(self, root: Tensor) -> Kept:
        name = "leaf" if root.grad_fn is None else root.grad_fn.name()
        made = recipe(root, self.unpack, about)
        if made is not None:
            made = settle(made, root)
            if made is None:
                self.refused[name] += 1
        if made is None:
            self.kept_bytes[name] += root.untyped_storage().nbytes()
        else:
            self.derived_bytes[name] += root.untyped_storage().nbytes()
            self.recipes.append(weakref.ref(made))
        return Kept(root, made)

    def unpack(self, packed: Packed) -> Tensor:
        kept, (size, stride, offset) = packed
        if kept.recipe is not None:
            self.computed += 1
            made = kept.recipe.compute()
            return made.as_strided(size, stride, offset - kept.offset + made.storage_offset())
        assert kept.tensor is not None
        if kept.tensor._version != kept.version:
            raise RuntimeError("edited in place")
        return kept.tensor.as_strided(size, stride, offset)

    def share(self) -> float:
        """Of the unique bytes that are no weights: the part that has to be kept."""
        kept = self.kept_bytes.total()
        return kept / (kept + self.derived_bytes.total())

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield


class _Weak:
    """The packed object of a saved tensor while somebody else holds it."""

    def __init__(self, kept: Kept, view: tuple[Any, ...]) -> None:
        self._kept, self._view = weakref.ref(kept), view

    def __call__(self) -> Packed | None:
        kept = self._kept()
        return None if kept is None else (kept, self._view)


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


def about(packed: Packed, upstream: bool) -> int:
    made = packed[0].recipe
    return 0 if made is None else made.depth


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


def settle(made: Recipe, tensor: Tensor) -> Recipe | None:
    """The recipe to keep if it gives `tensor` bit for bit with the same strides; None if not, or if it cannot run."""
    try:
        settled, result = made.settled(lambda packed, operand: (packed, operand))
    except RuntimeError:
        return None
    return settled if result.stride() == tensor.stride() and same_bits(result, tensor) else None


def derive(harness: Harness, tensor: Tensor) -> Recipe | None:
    """The recipe of `tensor` from what `harness` packed."""
    return recipe(tensor, harness.unpack, about)


def check(harness: Harness, tensor: Tensor) -> Recipe:
    """The recipe of `tensor`, which gives it; and another tensor is told from it."""
    made = derive(harness, tensor)
    assert made is not None
    settled = settle(made, tensor)
    assert settled is not None
    assert_bit_equal(settled.compute(), tensor.detach())
    other = tensor.detach().clone()
    other[(-1,) * other.dim()] = 77.0
    assert settle(made, other) is None
    return settled


def gradients(
    model: nn.Module, batch: Any, loss_of: Callable[[nn.Module, Any], Tensor], harness: Harness | None
) -> Any:
    """The loss and the gradient of each parameter that has one, of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    if harness is None:
        loss = loss_of(model, batch)
    else:
        with harness.hooks():
            loss = loss_of(model, batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
