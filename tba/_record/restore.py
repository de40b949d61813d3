"""Restore: the tensor that autograd gets back, rebuilt over wherever a record's bytes are in memory.

Guarantee: bit for bit what was saved, but for records that a lossy codec has packed; those come back alike each time.

Wants the engine's lock held, except `restore_in_child`.
"""

from __future__ import annotations

from torch import Tensor, UntypedStorage

from .._errors import ClosedError, TransferError
from .._memory import streams
from .encoded import Encoded, payload_of, unpacked
from .record import DERIVED, IN_MEMORY, RESTORED, Record
from .view import View, counted, is_edited


def restore(record: Record, view: View, *, alone: bool = False) -> Tensor:
    """One saved tensor of a record that is in memory or restored; `alone` if it may share no version counter.

    Raises TransferError for an emptied storage.
    """
    if record.encoded is not None:
        return view.on_plain(_decoded(record, record.encoded), record.encoded.begin)
    if record.state is RESTORED:
        restored, last = record.restored, record.last_view
        assert restored is not None
        if alone:
            tensor = view.over(restored.untyped_storage(), record.begin)
        elif last is not None and last[0] == view:
            tensor = last[1]
        else:
            tensor = view.on_plain(restored, record.begin)
            if record.saves > 1:
                record.keep_view(view, tensor)
        if record.ready is not None:
            streams.use(tensor, record.ready)
        return tensor
    assert record.alias is not None
    storage = record.alias.untyped_storage()
    if storage.nbytes() < record.end:  # `set_` would grow it, and give out what happens to be there
        raise TransferError(
            f"{record.name()}: its storage has {storage.nbytes()} bytes, it had {record.storage_bytes} when "
            "autograd saved it; whoever emptied it must fill it again before backward"
        )
    return view.on(record.alias)


def restore_in_child(record: Record, view: View) -> Tensor:
    """A saved tensor in a forked child, which has the memory and nothing else. Raises ClosedError."""
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
    stream, decoded = streams.current(record.device), record.decoded
    if decoded is not None and decoded[1] == stream and not is_edited(decoded[0]):
        whole = decoded[0]
    else:
        payload = payload_of(encoded, _storage(record))
        if record.ready is not None:
            streams.use(payload, record.ready)
        whole = counted(unpacked(encoded, payload))
    record.keep_decoded(whole if record.asks < record.saves else None, stream)
    return whole


def _storage(record: Record) -> UntypedStorage:
    if record.state is RESTORED:
        assert record.restored is not None
        return record.restored.untyped_storage()
    assert record.alias is not None
    return record.alias.untyped_storage()
