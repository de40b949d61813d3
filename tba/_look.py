"""Look: the tensor that autograd gets back, rebuilt over wherever a record's bytes are in memory.

Guarantees:

1. Bit for bit what was saved, but for records that a lossy codec has packed; those come back the same each time.
2. What goes to a program's own code has memory that nobody else looks at. PyTorch's operators only read what they
   saved; a custom Function may edit it, keep it, or return it as a gradient. In plain PyTorch it is told of an edit by
   the version counter, and a gradient that somebody else has too is copied by whoever accumulates it, who counts the
   references to the tensor; a view that was made for unpack has neither.

Wants the engine's lock held, except `look_in_child`, `goes_to_code` and `kept_for_code`.
"""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

import torch
from torch import Tensor, UntypedStorage, strided

from . import _recipe, _streams
from ._compress.compressor import payload_of, unpacked
from ._errors import ClosedError, TransferError
from ._record import DERIVED, IN_MEMORY, RESTORED, Encoded, Record
from ._torch import current_graph_task_id, current_node, graph_is_kept, is_operator, storage_use_count
from ._view import View, apart, counted, is_edited

# A storage's wrapper, which is looked at, and one tensor refer to it.
_ALONE = 2
# Where PyTorch's engine of autograd is called from: operators ask from there, Python code from a frame of its own.
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_RECIPES = vars(_recipe)
# How many nodes Python looks at in one backward, in search of Functions written in C++: see `_weights.Chains`.
_LOOKS = 512


class Detached(tuple):  # type: ignore[type-arg]  # mypy wants an argument that a plain pair has no use for
    """What pack gives for a tensor that stays, where it is not the very one that was saved: an alias, its version."""

    __slots__ = ()


def look(record: Record, view: View, *, alone: bool = False) -> Tensor:
    """One saved tensor of a record that is in memory or restored; `alone` if it may share no version counter.

    Raises TransferError for an emptied storage.
    """
    if record.encoded is not None:
        return view.on_plain(_decoded(record, record.encoded), record.encoded.begin)
    if record.state is RESTORED:
        restored, given = record.restored, record.given
        assert restored is not None
        if alone:
            tensor = view.over(restored.untyped_storage(), record.begin)
        elif given is not None and given[0] == view:
            tensor = given[1]
        else:
            tensor = view.on_plain(restored, record.begin)
            if record.saves > 1:
                record.given = view, tensor
        if record.ready is not None:
            _streams.use(tensor, record.ready)
        return tensor
    assert record.alias is not None
    storage = record.alias.untyped_storage()
    if storage.nbytes() < record.end:  # `set_` would grow it, and give out what happens to be there
        raise TransferError(
            f"{record.name()}: its storage has {storage.nbytes()} bytes, it had {record.storage_bytes} when "
            "autograd saved it; whoever emptied it must fill it again before backward"
        )
    return view.on(record.alias)


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
    makes a graph of 100,000 nodes crash when it is freed (`_weights.Chains`). So Functions written in C++, which have
    no frame, are found among the first nodes of a backward only.
    """
    if task == -1:
        return True
    if asker is not None and asker.f_code is not _RUN_BACKWARD:
        return asker.f_globals is not _RECIPES  # which hands them to operators
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
        record.decoded = None  # made for this one alone
        tensor = look(record, view)
        record.decoded = None
        return tensor, False
    record.given = None  # whoever else looks at the memory is counted
    tensor = look(record, view, alone=True)
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
    record.given = None
    tensor = look(record, view, alone=True)
    if record.state is RESTORED:
        return tensor, record.asks % record.saves == 0
    record.lent = record.lent or _owners(tensor) <= _ALONE + 1
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


def look_in_child(record: Record, view: View) -> Tensor:
    """The same in a forked child, which has the memory and nothing else. Raises ClosedError."""
    if record.state is DERIVED and record.recipe is not None:
        return view.over(record.recipe.compute().clone().untyped_storage(), 0)
    restored = record.state is RESTORED and record.restored is not None
    if restored or (record.state in IN_MEMORY and record.alias is not None):
        storage, begin = _storage(record), record.begin if restored else 0
        if record.encoded is not None:
            storage, begin = unpacked(record.encoded, payload_of(record.encoded, storage)), record.encoded.begin
        return view.over(storage, begin)
    raise ClosedError(
        f"{record.name()} was offloaded by the parent process; a forked child has no access to its storage. "
        "Run backward in the process that ran forward"
    )


def _decoded(record: Record, encoded: Encoded) -> Tensor:
    """The bytes of an encoded record, unpacked once for all that saved it and are asked for on the same stream."""
    stream, decoded = _streams.current(record.device), record.decoded
    if decoded is not None and decoded[1] == stream and not is_edited(decoded[0]):
        whole = decoded[0]
    else:
        payload = payload_of(encoded, _storage(record))
        if record.ready is not None:
            _streams.use(payload, record.ready)
        whole = counted(unpacked(encoded, payload))
    record.decoded = (whole, stream) if record.asks < record.saves else None
    return whole


def _storage(record: Record) -> UntypedStorage:
    if record.state is RESTORED:
        assert record.restored is not None
        return record.restored.untyped_storage()
    assert record.alias is not None
    return record.alias.untyped_storage()
