"""Restore: rebuilds a saved tensor for autograd over a record's bytes, wherever in memory they are.

Guarantee: it is bit for bit as saved, unless a lossy codec packed the record; then it has equal bits each time.

All but `restore_in_child` and `restore_apart` must be called with the engine's lock held.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, UntypedStorage

from .._device import streams
from .._errors import ClosedError, TransferError
from .encoded import Encoded
from .record import DERIVED, IN_MEMORY, RESTORED, Record
from .view import View, apart, counted, is_edited


def restore(record: Record, view: View, *, alone: bool = False) -> Tensor:
    """Rebuild one saved tensor of a record in memory; `alone`: without sharing its version counter.

    Raises TransferError if the storage was emptied.
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
    if storage.nbytes() < record.end:  # `set_` would grow it and expose arbitrary memory
        raise emptied(record)
    return view.on(record.alias)


def restore_apart(record: Record, view: View, read: Callable[[Record], Tensor]) -> Tensor:
    """Rebuild a saved tensor in its own memory, counting and changing nothing.

    Needs no lock; the record may be in the middle of a change. `read` returns what is in the store, flat over memory
    that nobody else has.

    Raises:
        RuntimeError: PyTorch's own, for a tensor that was edited in place.
        ClosedError, TransferError: from `read`.
    """
    if record.state is DERIVED and record.recipe is not None:
        return view.over(record.recipe.compute().clone().untyped_storage(), 0)
    record.check()
    restored, alias, begin = record.restored, record.alias, 0
    if restored is not None and not is_edited(restored):
        flat = restored
        if record.ready is not None:
            streams.use(flat, record.ready)
        begin = record.begin
    elif record.state in IN_MEMORY and alias is not None:
        if alias.untyped_storage().nbytes() < record.end:
            raise emptied(record)
        flat = alias
    else:
        flat, begin = read(record).to(record.device), record.begin
    return apart(_over(record, view, flat.untyped_storage(), begin))


def emptied(record: Record) -> TransferError:
    assert record.alias is not None
    return TransferError(
        f"{record.name()}: its storage has {record.alias.untyped_storage().nbytes()} bytes, it had "
        f"{record.storage_bytes} when autograd saved it; whoever emptied it must fill it again before backward"
    )


def restore_in_child(record: Record, view: View, *_: object) -> Tensor:
    """Rebuild a saved tensor in a forked child, which has the parent's memory but not its store. Raises ClosedError."""
    if record.state is DERIVED and record.recipe is not None:
        return view.over(record.recipe.compute().clone().untyped_storage(), 0)
    restored = record.state is RESTORED and record.restored is not None
    if restored or (record.state in IN_MEMORY and record.alias is not None):
        return _over(record, view, _storage(record), record.begin if restored else 0)
    raise ClosedError(
        f"{record.name()} was offloaded by the parent process; a forked child has no access to its storage. "
        "Run backward in the process that ran forward"
    )


def _decoded(record: Record, encoded: Encoded) -> Tensor:
    """Unpack an encoded record, once for all of its tensors requested on one stream."""
    stream, decoded = streams.current(record.device), record.decoded
    if decoded is not None and decoded[1] == stream and not is_edited(decoded[0]):
        whole = decoded[0]
    else:
        payload = encoded.payload(_storage(record))
        if record.ready is not None:
            streams.use(payload, record.ready)
        whole = counted(encoded.unpack(payload))
    record.keep_decoded(whole if record.asks < record.saves else None, stream)
    return whole


def _storage(record: Record) -> UntypedStorage:
    whole = record.restored if record.state is RESTORED else record.alias
    assert whole is not None
    return whole.untyped_storage()


def _over(record: Record, view: View, storage: UntypedStorage, begin: int) -> Tensor:
    """Make a tensor over a record's bytes in `storage`, which begin at byte `begin` unless they are encoded."""
    if record.encoded is not None:
        storage, begin = record.encoded.unpack(record.encoded.payload(storage)), record.encoded.begin
    return view.over(storage, begin)
