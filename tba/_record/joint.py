"""Joint: one record for tensors over one storage that a call of compiled code saves, although none is a view.

Compiled code returns query, key and value of a fused projection as tensors that share a storage but not a version
counter. Elsewhere such tensors get separate records, as one does not count the edits of another.

Guarantees:

1. A tensor that compiled code saves joins only a record that the same call has just made. The call saves all its
   tensors together, after its forward has returned, so no other code can edit one in between. Its backward asks for all
   of them together, so an error for one of them is an error for the node, as in plain PyTorch.
2. An edit through any joined tensor counts as an edit (`Record.versions`), and nothing joins later: another call that
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
    pending: Iterable[tuple[int, weakref.ref[Record]]], sequence_nr: int, storage: UntypedStorage, begin: int, end: int
) -> Record | None:
    """Find the record of bytes `[begin, end)` that the running call of compiled code has made; None if there is none.

    Args:
        pending: records of operators of this thread that may still be running, latest first, each with autograd's
            sequence number when it was saved.
        sequence_nr: autograd's sequence number now.
        storage: of the tensor being saved.
        begin, end: range of the tensor in its storage, in bytes.
    """
    if compiled_graph(sys._getframe(1)) is None:
        return None
    for number, reference in pending:
        if number != sequence_nr:
            break
        record = reference()
        if record is None or record.state is not PENDING or record.alias is None or record.encoded is not None:
            continue
        if record.begin <= begin and end <= record.end and is_over(record.alias, storage) and not record.is_edited():
            return record
    return None
