"""Derivations: records whose bytes nobody keeps, because others that are kept anyway give them again (`_derive`).

Guarantees:

1. A derivation is used only where it has been compared with the tensor it replaces, at that place of the step: each
   place in the first step, and again where another recipe comes up at it. Where all that it starts from is exact it
   must be bit-equal. Where a lossy codec has had some of it, it must be as near as that, and is
   compared every time if its operators may cancel or divide, as that depends on values.
2. An exact tensor (by the preset's class of its savers) is derived only from exact ones.
3. What is used where does not depend on timing: a first comparison reads back what it needs and has been written.
   But for a source that is edited in place while it is being written: it serves if the write has ended before.
4. A derivation stands on no tensor that was edited between being saved and being used, nor on a weight that is gathered
   for a while (FSDP, ZeRO) and may be gone when it is needed.

Wants the engine's lock held, except `again`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, distributed, nn

from . import _streams
from ._compress import is_whole
from ._derive import recipe, remember
from ._errors import OffloadError
from ._kinds import is_weight
from ._look import look
from ._recipe import Recipe
from ._recipes import same_bits
from ._record import DERIVED, IN_MEMORY, PENDING, RESTORED, Record
from ._view import View, counted, is_edited, span
from ._weights import MARK, WEIGHT, is_sharded

# How far off a recipe may be, relative to the tensor, that starts from 8 bits (which are off by less than a hundredth),
# and from fewer (4 by about a tenth). One that is wrong is off by the tensor's own size.
_NEAR = 0.03
_NEAR_OF_FEW_BITS = 0.25

Packed = tuple[Any, ...]


class Derivations:
    """What can be made again, and what has been found to come out right."""

    def __init__(self, unpack: Callable[[Any], Tensor], model: Callable[[], nn.Module | None]) -> None:
        self._unpack = unpack
        self._model = model
        self._right: dict[int, Any] = {}  # signature by place in the step
        self._wrong: dict[int, Any] = {}
        self._first_number = 0  # of the step
        self._comparing = 0  # the thread that does, or 0
        self._sharded = False  # whether the model's weights have ever been gathered ones
        self._looked = False  # whether that has been looked at in this step

    def look_for(self, record: Record) -> None:
        """In pack: note how a new record could be made again, and the record itself for others that follow from it."""
        root = record.root()
        if root is None:
            return
        record.keep_counter(root)
        if root._version == 0 and root.grad_fn is not None:
            record.recipe = recipe(root, self._unpack, self._about)
            view = View.of(root)
            begin, end = span(root, view)
            if record.begin <= begin and end <= record.end:  # of a large tensor it may have a part
                remember(root, self._unpack, _weakly(record, view))

    def replaces(self, record: Record) -> bool:
        """Whether a finished, pending record needs no bytes; it then has let go of them."""
        found, alias = record.recipe, record.alias
        if found is None or alias is None:
            return False
        if record.is_edited() or not is_whole(record, alias) or not self._right_for(record, found, alias):
            record.recipe = None
            return False
        for packed in found.sources:
            if isinstance(packed[0], Record):
                packed[0].saves += 1  # this asks for it too
        if record.stream is not None:
            _streams.goes_early(alias, record.stream)
        record.alias = None
        record.state = DERIVED
        return True

    def peek(self, record: Record, view: View) -> Tensor | None:
        """In unpack: what a comparison on this thread wants and is in memory, with nothing counted or moved.

        None where no comparison is under way, or the bytes have to be read in the usual way.
        """
        if self._comparing != threading.get_ident():
            return None
        if record.state is DERIVED:
            assert record.recipe is not None
            return view.over(_own(record.recipe.compute()), 0)
        if record.state not in IN_MEMORY and record.state is not RESTORED:
            return None
        decoded = record.decoded
        tensor = look(record, view)
        record.decoded = decoded
        return tensor

    def end_step(self, next_number: int) -> None:
        """Places count from here."""
        self._first_number = next_number
        self._looked = False

    def _about(self, packed: Packed, upstream: bool) -> tuple[int, Hashable] | None:
        first, second = packed
        if isinstance(first, Record):
            if upstream and (first.counter is None or first.counter._version != first.saved_version):
                return None
            return 0 if first.recipe is None else first.recipe.depth, (second.dtype, second.size)
        if type(first) not in (Tensor, nn.Parameter) or first.is_nested or first.layout is not torch.strided:
            return None
        if (upstream and first._version != second) or self._may_go(first):
            return None
        return 0, (first.dtype, first.shape)

    def _may_go(self, kept: Tensor) -> bool:
        """Whether it is a weight whose memory somebody may empty before backward has come by."""
        if not distributed.is_available() or not distributed.is_initialized() or not is_weight(kept):
            return False
        if not self._looked:
            self._looked, model = True, self._model()
            self._sharded = self._sharded or model is None or is_sharded(model)
        return self._sharded or getattr(kept.untyped_storage(), MARK, None) is not WEIGHT

    def _right_for(self, record: Record, found: Recipe, alias: Tensor) -> bool:
        off = max(map(_off, found.sources), default=0.0)
        if off and (record.codec is None or record.codec.properties.exact):
            return False
        place, signature = record.number - self._first_number, (found.signature, off)
        depends_on_values = off > 0 and found.amplifies
        if self._right.get(place) == signature and not depends_on_values:
            return True
        if self._wrong.get(place) == signature:
            return False
        self._comparing = threading.get_ident()
        try:
            made = found.compute()
        except OffloadError:  # an operand could not be read back, which says nothing about the recipe
            return False
        except RuntimeError:  # an operand was edited, or its operator was run in place
            self._wrong[place] = signature
            return False
        finally:
            self._comparing = 0
        right = made.stride() == alias.stride() and (same_bits(made, alias) or (off > 0 and _near(made, alias, off)))
        if not depends_on_values:
            (self._right if right else self._wrong)[place] = signature
        return right


def again(record: Record, view: View, *, alone: bool) -> Tensor:
    """A saved tensor of a derived record; `alone` if whoever asks may overwrite it. Raises what its sources raise."""
    stream, decoded = _streams.current(record.device), record.decoded
    if decoded is not None and decoded[1] == stream and not is_edited(decoded[0]):
        whole = decoded[0].clone() if alone else decoded[0]
    else:
        assert record.recipe is not None
        whole = counted(_own(record.recipe.compute()))
        record.decoded = (whole, stream) if record.asks + 1 < record.saves and not alone else None
    record.asks += 1
    if record.asks >= record.saves:
        record.decoded = None
    return view.over(whole.untyped_storage(), 0) if alone else view.on_plain(whole)


def _own(made: Tensor) -> torch.UntypedStorage:
    """Its bytes in a storage of their own, from the first on; a view of an operand shares that one's memory."""
    if made._base is not None or made.storage_offset() or made.untyped_storage().nbytes() != made.nbytes:
        made = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=made.device).copy_(made)
    return made.untyped_storage()


def _weakly(record: Record, view: View) -> Callable[[], Packed | None]:
    reference = record.ref

    def packed() -> Packed | None:
        found = reference()
        return None if found is None else (found, view)

    return packed


def _off(packed: Packed) -> float:
    """How far off what follows from a packed object may be; 0 for exact ones."""
    record = packed[0]
    if not isinstance(record, Record):
        return 0.0
    if record.state is DERIVED:
        return 0.0 if record.recipe is None else max(map(_off, record.recipe.sources), default=0.0)
    codec = record.encoded.codec if record.encoded is not None else None
    if record.state is PENDING:  # its codec may be waiting for the device
        codec = record.codec
    if codec is None or codec.properties.exact:
        return 0.0
    return _NEAR if (codec.properties.bits_per_element or 0) >= 8 else _NEAR_OF_FEW_BITS


def _near(made: Tensor, wanted: Tensor, off: float) -> bool:
    scale = torch.linalg.vector_norm(wanted, dtype=torch.float32)
    return bool(torch.linalg.vector_norm(made - wanted, dtype=torch.float32) <= off * scale)
