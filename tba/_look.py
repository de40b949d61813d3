"""Look: the tensor that autograd gets back, rebuilt over wherever a record's bytes are in memory.

Guarantee: bit for bit what was saved, but for records that a lossy codec has packed; those come back the same each
time.
Wants the engine's lock held, except `look_in_child`.
"""

from __future__ import annotations

from torch import Tensor, UntypedStorage

from . import _streams
from ._compress import payload_of, unpacked
from ._errors import ClosedError, TransferError
from ._record import IN_MEMORY, Encoded, Record, RecordState, View


def look(record: Record, view: View) -> Tensor:
    """One saved tensor of a record that is in memory or restored. Raises TransferError for an emptied storage."""
    if record.encoded is not None:
        return view.over(_decoded(record, record.encoded), record.encoded.begin)
    if record.state is RecordState.RESTORED:
        assert record.restored is not None
        tensor = view.over(record.restored, record.begin)
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


def look_in_child(record: Record, view: View) -> Tensor:
    """The same in a forked child, which has the memory and nothing else. Raises ClosedError."""
    if record.state is RecordState.DERIVED and record.recipe is not None:
        return view.over(record.recipe.compute().clone().untyped_storage(), 0)
    restored = record.state is RecordState.RESTORED and record.restored is not None
    if restored or (record.state in IN_MEMORY and record.alias is not None):
        storage, begin = _storage(record), record.begin if restored else 0
        if record.encoded is not None:
            storage, begin = unpacked(record.encoded, payload_of(record.encoded, storage)), record.encoded.begin
        return view.over(storage, begin)
    raise ClosedError(
        f"{record.name()} was offloaded by the parent process; a forked child has no access to its storage. "
        "Run backward in the process that ran forward"
    )


def _decoded(record: Record, encoded: Encoded) -> UntypedStorage:
    """The bytes of an encoded record, unpacked once for all that saved it."""
    decoded = record.decoded
    if decoded is None:
        payload = payload_of(encoded, _storage(record))
        if record.ready is not None:
            _streams.use(payload, record.ready)
        decoded = unpacked(encoded, payload)
    record.decoded = decoded if record.asks < record.saves else None
    return decoded


def _storage(record: Record) -> UntypedStorage:
    if record.state is RecordState.RESTORED:
        assert record.restored is not None
        return record.restored
    assert record.alias is not None
    return record.alias.untyped_storage()
