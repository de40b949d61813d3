"""Joint: one record for tensors over one storage that a call of compiled code saves, though none is a view of another.

Query, key and value of a fused projection come out of compiled code as tensors of their own, each with a version
counter of its own. Elsewhere such tensors are told apart, as one counts edits that the other does not.

Guarantees:

1. What compiled code saves joins a record that the same call has made just before. It saves in one go, when its forward
   has returned, so no code runs in between that could edit one of them, and its backward asks for all of them at once,
   so what PyTorch raises for one of them it raises for the node.
2. An edit through any tensor that joined is an edit (`Record.versions`), and nothing joins later: another call that
   saves one of them finds the record by its first tensor, or makes its own.

Assumption: nothing within compiled code's forward records a graph.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable

from torch import UntypedStorage

from .._torch.private import compiled_graph
from .record import PENDING, Record
from .view import is_over


def joined(
    pending: Iterable[tuple[int, weakref.ref[Record]]],
    sequence_nr: int,
    storage: UntypedStorage,
    begin: int,
    end: int,
) -> Record | None:
    """The record of bytes `[begin, end)` that the call of compiled code which saves now has made; None if none does.

    `pending`: what operators of this thread that may still be running have saved, latest first, each with autograd's
    sequence number at that time; it is `sequence_nr` now.
    """
    if compiled_graph(sys._getframe(1)) is None:
        return None
    for number, reference in pending:
        if number != sequence_nr:
            break
        record = reference()
        if record is not None and record.state is PENDING and _shows(record, storage, begin, end):
            return record
    return None


def _shows(record: Record, storage: UntypedStorage, begin: int, end: int) -> bool:
    alias = record.alias
    return (
        alias is not None
        and record.encoded is None
        and record.begin <= begin
        and end <= record.end
        and is_over(alias, storage)
        and not record.is_edited()
    )
