"""Tools for tests of exactness: comparison to the last bit, training runs, and proof that the bytes took the file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tba import Offloader, OffloadStats

CPU = torch.device("cpu")
Context = Callable[[], AbstractContextManager[Any]]
Loss = Callable[[nn.Module, Any], Tensor]
# (parameters) -> optimizer
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def raw_bytes(tensor: Tensor) -> Tensor:
    """The elements' bytes in logical order, uint8 [nbytes]; of sparse tensors, those of their parts in turn."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return torch.cat([raw_bytes(part) for part in _parts(tensor)])
    return (
        tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    )


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def difference(actual: Any, expected: Any) -> str:
    """How two values differ to the last bit, or "": tensors (NaNs of equal bytes are equal), None, nested lists."""
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        for name in ("shape", "dtype", "device", "layout"):
            got, wanted = getattr(actual, name), getattr(expected, name)
            if got != wanted:
                return f"{name} is {got}, expected {wanted}"
        if expected.layout is torch.strided and actual.stride() != expected.stride():
            return f"stride is {actual.stride()}, expected {expected.stride()}"
        a, b = raw_bytes(actual), raw_bytes(expected)
        if a.shape != b.shape:
            return f"{a.numel()} bytes, expected {b.numel()}"
        different = int((a != b).sum())
        return f"{different} of {a.numel()} bytes differ ({actual.dtype}{list(actual.shape)})" if different else ""
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple) and len(actual) == len(expected):
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            if what := difference(one, other):
                return f"[{index}]: {what}"
        return ""
    if isinstance(expected, dict) and isinstance(actual, dict) and actual.keys() == expected.keys():
        for key, other in expected.items():
            if what := difference(actual[key], other):
                return f"[{key!r}]: {what}"
        return ""
    return "" if actual is None and expected is None else f"{type(actual).__name__}, expected {type(expected).__name__}"


def assert_bit_equal(actual: Any, expected: Any, what: str = "") -> None:
    """Shape, stride, dtype, device and every byte are the same: of tensors or None, in lists, tuples and dicts."""
    found = difference(actual, expected)
    assert not found, f"{what} {found}".strip()


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether two runs gave the same gradients, and any at all."""
    return len(ours) == len(theirs) > 0 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def assert_adds_up(stats: OffloadStats) -> None:
    """The invariant of the counters, and no failed transfer."""
    parts = stats.weight_bytes + stats.duplicate_bytes + stats.kept_bytes + stats.offloaded_bytes
    assert stats.saved_bytes == parts, stats
    assert stats.kept_bytes == sum(stats.kept_by_reason.values()), stats
    assert not stats.errors, stats


def assert_through_file(stats: OffloadStats, *, kept_because: Collection[str] = (), unread_bytes: int = 0) -> None:
    """Everything that was handed over went to the file and came back from it; nothing was answered from memory.

    Holds only where `flush()` was called between forward and backward.

    Args:
        stats: of an engine with `min_tensor_bytes=0`.
        kept_because: reasons for which a tensor may have stayed in memory.
        unread_bytes: of tensors that are saved where no gradient flows, so that nobody asks for them.
    """
    assert_adds_up(stats)
    assert stats.offloaded_bytes > 0, stats
    assert stats.forwarded_bytes == 0, stats
    assert stats.written_bytes >= stats.offloaded_bytes, stats
    assert stats.read_bytes >= stats.offloaded_bytes - unread_bytes > 0, stats
    unexpected = {reason: nbytes for reason, nbytes in stats.kept_by_reason.items() if nbytes}
    for reason in kept_because:
        unexpected.pop(reason, None)
    assert not unexpected, f"kept in memory: {unexpected}"


def on(value: Any, device: torch.device) -> Any:
    """A model, a tensor, or a batch of tensors on a device: as it is where that is the CPU, on which all are made."""
    if device.type == "cpu":
        return value
    return value.to(device) if isinstance(value, nn.Module) else tree_map_only(Tensor, lambda t: t.to(device), value)


@dataclass
class Run:
    """Losses, gradients and weights of a training run; every tensor is a copy."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)  # per step, by name of the parameter
    weights: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers after the last step

    def assert_equals(self, other: Run) -> None:
        """Bit for bit the same losses, gradients of each step, final parameters and buffers."""
        assert_bit_equal(self.losses, other.losses, "losses")
        assert_bit_equal(self.gradients, other.gradients, "gradients")
        assert_bit_equal(self.weights, other.weights, "weights")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def first_argument(model: nn.Module, batch: Any) -> Tensor:
    """The model's own loss: called with the batch, which is a dict of keywords or a tuple of arguments."""
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss = output if isinstance(output, Tensor) else output.loss
    assert isinstance(loss, Tensor)
    return loss


def run_training(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    *,
    steps: int = 3,
    optimizer: MakeOptimizer = adamw,
    context: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
    backward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    between: Callable[[], None] | None = None,
    backward_inside: bool = False,
    autocast: bool = False,
    forwards: int = 1,
    retain_graph: bool = False,
    seed: int = 7,
    device: torch.device = CPU,
) -> Run:
    """Train for some steps from a fixed seed.

    Args:
        make_model, make_batch: called after seeding; each step takes `forwards` new batches.
        context: entered around each step's forwards, given the model; None: plain PyTorch.
        backward_context: entered around each step's backwards.
        between: called between forward and backward (`flush`).
        backward_inside: run backward before leaving the context.
        autocast: bf16 around the forwards.
        forwards: how many forwards come before as many backwards, in the same order.
        retain_graph: passed to backward.
        device: where the model and its batches go.
    """
    torch.manual_seed(seed)
    model = on(make_model(), device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    steps_of = optimizer(trained)
    run = Run()

    def backward(losses: list[Tensor]) -> None:
        if between is not None:
            between()
        with backward_context():
            for loss in losses:
                loss.backward(retain_graph=retain_graph)

    for _ in range(steps):
        made = [make_batch() for _ in range(forwards)]
        if device.type == "sim" and any(isinstance(each, Tensor) and each.is_nested for each in tree_leaves(made)):
            pytest.skip("PyTorch's attention on nested tensors aborts on a device of another backend")
        batches = [on(batch, device) for batch in made]
        with context(model) if context is not None else nullcontext():
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
                losses = [first_argument(model, batch) for batch in batches]
            if backward_inside:
                backward(losses)
        if not backward_inside:
            backward(losses)
        run.losses += [loss.detach().clone() for loss in losses]
        run.gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
        steps_of.step()
        steps_of.zero_grad()
    run.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return run


class Observer:
    """An empty pair of hooks that counts what autograd saves: an account independent of the engine's own.

    Attributes:
        saved_bytes: of every tensor handed over (as many bytes as it shows).
        weight_bytes: of those on the storage of a parameter or buffer of `model`.
        others: how many non-empty strided tensors are on no such storage.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.saved_bytes = self.weight_bytes = self.others = 0
        self._model = model
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _same)

    def __enter__(self) -> Observer:
        tensors = [*self._model.parameters(), *self._model.buffers()] if self._model is not None else []
        # Addresses tell here: these tensors outlive the context.
        self._addresses = {t.untyped_storage().data_ptr() for t in tensors}
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor:
        plain = tensor.detach().values() if tensor.is_nested else tensor
        if plain.layout is torch.strided and type(plain) in (Tensor, nn.Parameter):
            self.saved_bytes += plain.nbytes
            if plain.untyped_storage().data_ptr() in self._addresses:
                self.weight_bytes += plain.nbytes
            elif plain.nbytes:
                self.others += 1
        return tensor.detach()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def gradients_of(
    model: nn.Module, ids: Tensor, offload: Offloader | None, *, steps: int, flush: bool
) -> tuple[list[Tensor], OffloadStats | None]:
    """The gradients of some steps of a model that returns its loss, and the statistics of `offload`: it is closed."""
    gradients: list[Tensor] = []
    for _ in range(steps):
        model.zero_grad()
        with offload if offload is not None else nullcontext():
            loss = model(ids)
            # Within the context: at its end the prefetch begins, and forwards what is not written yet.
            if offload is not None and flush:
                offload.flush()
        loss.backward()
        del loss
        gradients += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    if offload is None:
        return gradients, None
    stats = offload.stats()
    offload.close()
    return gradients, stats
