"""User code: gives a program's own code saved tensors in memory that nothing else uses.

PyTorch's operators only read saved tensors. A custom Function may edit one, keep it, or return it as a gradient. In
plain PyTorch the version counter shows an edit, and a gradient that is referenced elsewhere is copied when it is
accumulated. A view made in unpack has neither that counter nor those references.

All but `goes_to_code` and `kept_for_code` must be called with the engine's lock held.
"""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

from torch import Tensor, strided

from .._torch.private import (
    current_graph_task_id,
    current_node,
    graph_is_kept,
    is_operator,
    run_backward,
    storage_use_count,
)
from .record import RESTORED, Record
from .restore import restore
from .view import View, apart

_ALONE = 2  # references to the storage of one tensor: the tensor's, and that of the wrapper used to count them
_LOOKS = 512  # nodes inspected per backward in search of C++ Functions: see `weights.Chains`
_RECIPES = "tba._derive"  # the package that unpacks saved tensors to pass them to operators


def is_for_operators(asker: FrameType) -> bool:
    """Whether a recipe asks, which passes the tensors to operators."""
    return asker.f_globals.get("__package__") == _RECIPES


class Detached(tuple):  # type: ignore[type-arg]  # mypy wants an argument that a plain pair has no use for
    """(alias, its version): what pack returns for a tensor that stays, unless it returns the saved tensor itself."""

    __slots__ = ()


class _Looks(threading.local):
    """A thread's current backward (graph task), and how many of its nodes may still be inspected."""

    def __init__(self) -> None:
        self.task = -1
        self.left = 0


_looks = _Looks()
_operators: set[type] = set()  # types of PyTorch's own nodes, which live as long as the process
_found = threading.Event()  # a node of another type, ever


def goes_to_code(task: int, asker: FrameType | None, *, alike: bool = False) -> bool:
    """Whether a program's own code asks for a tensor, in backward (graph task `task`) or outside it (-1).

    That is the backward of a custom Function, including compiled code, or code that reads `y.grad_fn._saved_self`.
    `asker` is the innermost Python frame outside the hook. The node would tell too, but inspecting every node makes a
    graph of 100,000 nodes crash when it is freed (`nodes`). So Functions written in C++, which have no frame, are found
    only among the first `_LOOKS` nodes of a backward, and not looked for where the step does as one before it did
    (`alike`) and none has ever been found.
    """
    if task == -1:
        return True
    if asker is not None and asker.f_code is not run_backward:
        return not is_for_operators(asker)
    if alike and not _found.is_set():
        return False
    if _looks.task != task:
        _looks.task, _looks.left = task, _LOOKS
    if not _looks.left:
        return False
    _looks.left -= 1
    kind = type(current_node())
    if kind in _operators:
        return False
    if is_operator(kind):
        _operators.add(kind)
        return False
    _found.set()
    return True


def look_for_code(record: Record, view: View, task: int) -> tuple[Tensor, bool]:
    """Rebuild a tensor in memory of its own; also return whether that memory was the record's, which must drop it."""
    only_once = task != -1 and not graph_is_kept()
    if only_once and record.was_saved_together() and record.encoded is None:
        return _lend(record, view)
    if record.encoded is not None:
        record.keep_decoded(None)  # unpack anew, for this caller
        tensor = restore(record, view)
        record.keep_decoded(None)
        return tensor, False
    record.keep_view(None)  # it would count as another owner of the memory
    tensor = restore(record, view, alone=True)
    restored = record.state is RESTORED
    # Restored memory goes to its last saver, because it can be read again. An alias goes only to its sole saver, and
    # only when the graph is being freed.
    may_go = record.asks >= record.saves if restored else only_once and record.saves == 1
    if may_go and _owners(tensor) <= _ALONE + 1:  # the record's own tensor
        return tensor, restored
    return apart(tensor), False


def _lend(record: Record, view: View) -> tuple[Tensor, bool]:
    """As `look_for_code`, for the node that saved all tensors of a record and asks for each in turn.

    They share memory as they did when saved. A copy for each would take the spanned memory once per tensor.
    """
    record.keep_view(None)
    tensor = restore(record, view, alone=True)
    if record.state is RESTORED:
        return tensor, record.asks % record.saves == 0
    if _owners(tensor) <= _ALONE + 1:
        record.lend()
    return tensor if record.lent else apart(tensor), False


def kept_for_code(packed: tuple[Any, ...], *, shared: bool) -> Tensor:
    """Return a tensor that was kept for a program's own code; `shared`: others may be derived from it."""
    tensor: Tensor = packed[0]
    if type(packed) is Detached:
        return _owned(tensor, shared=shared)
    if current_graph_task_id() != -1:
        _guard(tensor)
    return tensor


def _guard(leaf: Tensor) -> None:
    """Keep the running node from returning a gradient in the memory of `leaf`, such as a weight.

    In plain PyTorch a Function may return a tensor it saved: accumulation copies it, because the program references it
    too. PyTorch assumes that a tensor from an unpack hook is unshared and would store it as `.grad` without a copy. The
    gradient would then be in the weight's memory.
    """

    def copied(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
        handle.remove()
        found = [gradient is not None and _same_memory(gradient, leaf) for gradient in gradients]
        if not any(found):
            return None
        pairs = zip(gradients, found, strict=True)
        return tuple(gradient.clone() if same and gradient is not None else gradient for gradient, same in pairs)

    handle = current_node().register_hook(copied)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    try:
        return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse, functorch wrappers: no storage
        return False


def _owned(tensor: Tensor, *, shared: bool) -> Tensor:
    if type(tensor) is not Tensor or tensor.layout is not strided or tensor.is_nested or not tensor.numel():
        return tensor
    try:
        owners = _owners(tensor)
    except (RuntimeError, NotImplementedError):  # functorch wrappers, zero tensors: no storage
        return tensor
    alone = owners <= _ALONE and current_graph_task_id() != -1 and not graph_is_kept()
    return tensor if alone and not shared else apart(tensor)


def _owners(tensor: Tensor) -> int:
    return storage_use_count(tensor.untyped_storage()._cdata)
