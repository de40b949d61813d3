"""The private functions of torch mean what the engine takes them to mean."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tba import OffloadWarning
from tba._torch import private


class Look(torch.autograd.Function):
    """Asks in its backward."""

    seen: tuple[int, bool, str]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Look.seen = (
            private.current_graph_task_id(),
            private.graph_is_kept(),
            type(private.current_node()).__name__,
        )
        return gradients[0]


@pytest.mark.parametrize(
    ("own", "state", "pooled"),
    [(False, "EXECUTION", True), (True, "WARMUP", True), (True, "RECORDING", True), (True, "EXECUTION", False)],
)
def test_memory_of_cuda_graphs_is_told_by_its_deleter_or_by_who_runs_them(
    own: bool, state: str, pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch has it, but for the device: replayed outputs have no deleter; who runs a graph first knows its own."""
    trees = import_module("torch._inductor.cudagraph_trees")
    made, other = torch.ones(8), torch.ones(8)
    run = SimpleNamespace(user_visible_output_idxs=())
    node = trees.CUDAWarmupNode(run, None, (0, 0), None, 0, None, None, True, None)
    node.outputs_weakrefs.append(trees.map_to_ref(made))
    manager = SimpleNamespace(current_node=node, path_state=trees.ExecutionState[state])
    monkeypatch.setattr(trees, "get_manager", lambda index, create_if_none_exists: manager)
    monkeypatch.setattr(private, "_is_allocators", lambda storage: own)

    def asked(tensor: torch.Tensor, kind: str = "cuda") -> bool:
        device = torch.device(kind, 0)
        return private.in_graph_pool(SimpleNamespace(device=device, untyped_storage=tensor.untyped_storage))  # type: ignore[arg-type]

    assert asked(made) == pooled
    assert asked(other) == (not own)
    assert not asked(made, "xpu")
    manager.current_node = None
    assert asked(made) == (not own)
    monkeypatch.setattr(private, "missing", {})
    del manager.current_node  # a torch of another form
    if own:
        with pytest.warns(OffloadWarning, match="CUDA graphs moves, and they are recorded again"):
            assert not asked(made)
        assert not asked(made)


@pytest.mark.parametrize(("how", "kept"), [({}, False), ({"retain_graph": True}, True), ({"create_graph": True}, True)])
def test_what_is_known_about_a_running_backward(how: dict[str, bool], kept: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    numbers = []
    for _ in range(2):
        assert private.current_graph_task_id() == -1
        torch.autograd.grad(Look.apply(x).sum(), x, **how)
        number, is_kept, name = Look.seen
        assert (is_kept, name) == (kept, "LookBackward")
        numbers.append(number)
    assert -1 not in numbers
    assert numbers[0] != numbers[1]
    assert private.current_graph_task_id() == -1


def test_the_sequence_number_moves_with_each_node_of_this_thread() -> None:
    x = torch.ones(3, requires_grad=True)
    begun = private.sequence_nr()
    assert private.sequence_nr() == begun
    y = x * 2
    assert y.grad_fn is not None
    assert private.sequence_nr() == begun + 1
    assert y.grad_fn._sequence_nr() == begun
    with torch.no_grad():
        _ = x * 2
    assert private.sequence_nr() == begun + 1


def test_a_pack_hook_runs_between_its_own_node_and_the_next() -> None:
    """By this the engine knows when an operator's kernel has returned."""
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(private.sequence_nr())
        return tensor.detach()

    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        before = private.sequence_nr()
        y = x.exp()
        z = y.sin()
    assert y.grad_fn is not None
    assert z.grad_fn is not None
    assert seen == [before + 1, before + 2]  # its own node has been made, the next one has not
    assert private.sequence_nr() == before + 2


def test_a_storage_is_counted_by_who_shares_it() -> None:
    storage = torch.ones(3).untyped_storage()
    alone = private.storage_use_count(storage._cdata)
    view = torch.empty(0).set_(storage, 0, (3,), (1,))
    assert private.storage_use_count(storage._cdata) == alone + 1
    alias = view.detach()
    assert private.storage_use_count(storage._cdata) == alone + 2
    del view, alias
    assert private.storage_use_count(storage._cdata) == alone


def test_modes_are_counted() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    before = private.dispatch_mode_count(), private.function_mode_count()
    with Mode():
        assert private.dispatch_mode_count() == before[0] + 1
    with torch.device("cpu"):
        assert private.function_mode_count() == before[1] + 1
    assert (private.dispatch_mode_count(), private.function_mode_count()) == before
