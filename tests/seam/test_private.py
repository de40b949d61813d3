"""The private functions of torch: they exist, mean what the engine takes them to mean, and are missed by their name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tba._torch import private

SOURCE = Path(private.__file__)
PATHS = re.findall(r'_find\(\s*"([\w.]+)"', SOURCE.read_text())


def load_again() -> ModuleType:
    """A second copy of the module: the one in use stays as it is."""
    spec = importlib.util.spec_from_file_location("torch_seam_again", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_paths_are_found() -> None:
    assert len(PATHS) >= 10
    assert all(callable(private._find(path)) for path in PATHS)


@pytest.mark.parametrize("path", PATHS)
def test_a_torch_without_one_is_refused_by_its_name(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *parents, name = path.split(".")
    holder: Any = torch._C
    for parent in parents:
        holder = getattr(holder, parent)
    monkeypatch.delattr(holder, name)
    with pytest.raises(ImportError, match=re.escape(f"tba needs torch._C.{path}, which torch {torch.__version__}")):
        load_again()


def test_a_missing_parent_is_no_attribute_error() -> None:
    with pytest.raises(ImportError, match=r"torch\._C\._no_such_module\.function"):
        private._find("_no_such_module.function")


def test_nobody_else_reaches_into_torch_c() -> None:
    others = [path for path in SOURCE.parent.rglob("*.py") if path != SOURCE and "torch._C." in path.read_text()]
    assert others == []


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
