"""User code: what a program's own code gets of saved tensors, in memory that nobody else looks at.

PyTorch's operators only read what they saved; a custom Function may edit it, keep it, or return it as a gradient. In
plain PyTorch it is told of an edit by the version counter, and a gradient that somebody else has too is copied by what
accumulates it, which counts the references to the tensor; a view that was made for unpack has neither.

Wants the engine's lock held, except `goes_to_code` and `kept_for_code`.
"""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

import torch
from torch import Tensor, strided

from .._torch.private import current_graph_task_id, current_node, graph_is_kept, is_operator, storage_use_count
from .record import RESTORED, Record
from .restore import restore
from .view import View, apart

# A storage's wrapper, which is looked at, and one tensor refer to it.
_ALONE = 2
# Where PyTorch's engine of autograd is called from: operators ask from there, Python code from a frame of its own.
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
# How many nodes Python looks at in one backward, in search of Functions written in C++: see `weights.Chains`.
_LOOKS = 512
# The package that unpacks saved tensors to hand them to operators.
_RECIPES = "tba._derive"


def is_for_operators(asker: FrameType) -> bool:
    """Whether a recipe asks, which hands what it gets to operators."""
    return asker.f_globals.get("__package__") == _RECIPES


class Detached(tuple):  # type: ignore[type-arg]  # mypy wants an argument that a plain pair has no use for
    """What pack gives for a tensor that stays, where it is not the very one that was saved: an alias, its version."""

    __slots__ = ()


class _Looks(threading.local):
    """Per thread: the backward (graph task) under way, and how many of its nodes may still be looked at."""

    def __init__(self) -> None:
        self.task = -1
        self.left = 0


_looks = _Looks()


def goes_to_code(task: int, asker: FrameType | None) -> bool:
    """Whether a program's own code asks, in backward (graph task `task`) or outside of it (-1).

    That is a custom Function's backward, compiled code's among them, or somebody who looks at `y.grad_fn._saved_self`.
    `asker` is the innermost Python frame outside of the hook: the node itself would tell as well, but to look at each
    makes a graph of 100,000 nodes crash when it is freed (`weights.Chains`). So Functions written in C++, which have
    no frame, are found among the first nodes of a backward only.
    """
    if task == -1:
        return True
    if asker is not None and asker.f_code is not _RUN_BACKWARD:
        return not is_for_operators(asker)
    if _looks.task != task:
        _looks.task, _looks.left = task, _LOOKS
    if not _looks.left:
        return False
    _looks.left -= 1
    return not is_operator(type(current_node()))


def look_for_code(record: Record, view: View, task: int) -> tuple[Tensor, bool]:
    """The same in memory of its own, and whether that is what the record had, which must let go of it then."""
    only_once = task != -1 and not graph_is_kept()
    if only_once and record.joined and record.saves == len(record.joined) + 1 and record.encoded is None:
        return _lend(record, view)
    if record.encoded is not None:
        record.keep_decoded(None)  # made for this one alone
        tensor = restore(record, view)
        record.keep_decoded(None)
        return tensor, False
    record.keep_view(None)  # so that it does not count as another owner of the memory
    tensor = restore(record, view, alone=True)
    restored = record.state is RESTORED
    # What can be read again goes to who comes last, all else to the only one who saved it, if nobody asks again.
    may_go = record.asks >= record.saves if restored else only_once and record.saves == 1
    if may_go and _owners(tensor) <= _ALONE + 1:  # what the record looks at it with
        return tensor, restored
    return apart(tensor), False


def _lend(record: Record, view: View) -> tuple[Tensor, bool]:
    """As `look_for_code`, to the one node that saved all of a record, which asks for each of its tensors in turn.

    They share memory as they did when it saved them: a copy for each would be as many times what it spans.
    """
    record.keep_view(None)
    tensor = restore(record, view, alone=True)
    if record.state is RESTORED:
        return tensor, record.asks % record.saves == 0
    if _owners(tensor) <= _ALONE + 1:
        record.lend()
    return tensor if record.lent else apart(tensor), False


def kept_for_code(packed: tuple[Any, ...], *, shared: bool) -> Tensor:
    """A tensor that was kept, for a program's own code; `shared` if others may be derived from it."""
    tensor: Tensor = packed[0]
    if type(packed) is Detached:
        return _owned(tensor, shared=shared)
    if current_graph_task_id() != -1:
        _guard(tensor)
    return tensor


def _guard(leaf: Tensor) -> None:
    """See to it that the node which runs now returns no gradient in the memory of `leaf`, such as a weight.

    In plain PyTorch a Function may return what it saved, and whoever accumulates that copies it, as the program has it
    too. Of what an unpack hook gave, PyTorch makes a tensor of its own, nobody else's, and takes it for `.grad` as it
    is. The weight's memory would be the gradient's.
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
