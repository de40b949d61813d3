"""Observer: the engine's own hooks under one preset, which count the bytes of each class and move nothing.

Tensors are recognised, shared, encoded and recomputed as in a training with `compress=`, but the tier is `keep` and no
tensor is too small. The observer also notes the class of each saved tensor.

Assumption: hooks are pushed for one forward on one thread; unpack may run on autograd's device threads.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import EllipsisType, FrameType
from typing import Any

from torch import Tensor, nn

from compact import CodecError, Preset, Saved
from io_backends import Store

from .._compress.calls import Linear, SavedBy, forget, kind_of
from .._config import OffloadConfig
from .._engine.packing import Packed
from .._engine.saver import Saver
from .._errors import ConfigError
from .._group.node_share import NodeShare
from .._record.plain import Shell, shown_bytes
from .._record.record import DERIVED, Record
from .._record.user_code import is_for_operators
from .._torch.hook_stack import Pair
from .._torch.modes import quiet
from .._torch.private import current_node

NEVER_ASKED, KEPT = "never asked for", "kept as they are"
_CHECKPOINT = "torch.utils.checkpoint"

# Strictest first: a tensor that operators of several classes saved counts for the first of them. In every preset, the
# bits per element fall in this order.
_STRICTEST_FIRST = (
    *(Saved.UNKNOWN, Saved.INDEX, Saved.PROBABILITIES, Saved.ATTENTION_STATISTICS, Saved.NORM_STATISTICS, Saved.MASK),
    *(Saved.ATTENTION, Saved.NORM_INPUT, Saved.ACTIVATION_INPUT, Saved.PRODUCT_FACTOR, Saved.LINEAR_INPUT),
)


@dataclass(slots=True)
class _Piece:
    """One record: its bytes before the codecs, the classes of its savers, and the node that unpacked it first."""

    record: Record | None  # until the forward is over
    nbytes: int
    kinds: set[Saved] = field(default_factory=set)
    asked_by: str = NEVER_ASKED

    @property
    def kind(self) -> Saved:
        """The class that the record counts for."""
        return next(kind for kind in _STRICTEST_FIRST if kind in self.kinds)


class Observer(Saver):
    """Hooks for one forward and backward of `model`.

    Args:
        preset: the codec of each class.
        seed: seeds the codecs' noise, together with the order of saving.

    Attributes:
        before_bytes: bytes saved by class, without weights and each storage once; 0 for a class whose bytes all count
            for another one. Set after the forward.
        after_bytes: bytes kept of them: what codecs made, and nothing of tensors that are recomputed.
        lossy: number of records that a lossy codec encoded, and of layers that were projected.
    """

    def __init__(self, model: nn.Module, preset: Preset, seed: int) -> None:
        config = OffloadConfig(tier="keep", compress=preset, seed=seed, min_tensor_bytes=0)
        super().__init__(config, lambda: model, _no_store, NodeShare(1))
        self.before_bytes: dict[Saved, int] = {}
        self.after_bytes: dict[Saved, int] = {}
        self.lossy = 0
        self._observed = model
        self._preset = preset
        self._pieces: dict[int, _Piece] = {}  # by the record's number
        self._kept_bytes = 0
        self._projecting = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Push the hooks for a forward; afterwards every record holds what a training would keep.

        Raises:
            ConfigError: a codec does not fit this model, for example a rank above every width.
        """
        assert self.compressor is not None
        with ExitStack() as stack:
            try:
                linear = self.compressor.projection(self._observed)
            except ConfigError:  # no linear layer at all: `audit` warns that the preset has no effect
                linear = None
            except CodecError as error:
                raise ConfigError(
                    f"preset {self._preset.name!r} cannot be audited on this model: {error}; name another codec with "
                    "Preset.override"
                ) from error
            mode = SavedBy(self._projected(linear) if linear is not None else None)
            stack.callback(mode.norms(self._observed))
            self._packing.mark_weights()
            pair = Pair(self.pack, self.unpack)
            pair.enter(push=True)
            stack.callback(pair.pop)
            forget()
            stack.enter_context(mode)
            yield
        with self.locked(), quiet():
            self.pending.pass_on(None)
            if self.pending.waits:
                self.pending.settle(wait=True)
        self._note_what_became()

    def pack(self, tensor: Tensor) -> Packed:
        """Pack a tensor for autograd, and note its class."""
        kind = Saved.LINEAR_INPUT if self._projecting else kind_of(tensor)
        weight_bytes = self.counters.weight_bytes
        packed = super().pack(tensor)
        records = list(_records(packed))
        for record in records:
            if record.number not in self._pieces:
                self._pieces[record.number] = _Piece(record, record.nbytes)
            self._pieces[record.number].kinds.add(kind)
        if not records and self.counters.weight_bytes == weight_bytes:
            self._kept_bytes += shown_bytes(tensor)
        return packed

    def unpack(self, packed: Packed, asker: FrameType | EllipsisType | None = ...) -> Tensor:
        """Restore a tensor for autograd or for a recipe, and note which node unpacked it first."""
        record = packed[0]
        piece = self._pieces.get(record.number) if isinstance(record, Record) else None
        if asker is ...:
            asker = sys._getframe().f_back
        if piece is not None and piece.asked_by is NEVER_ASKED and not (asker and is_for_operators(asker)):
            # A checkpoint unpacks the inputs of what it recomputes, while a node inside it waits for its own tensors.
            node = current_node()
            if node is not None:
                by_checkpoint = asker is not None and asker.f_globals.get("__name__") == _CHECKPOINT
                piece.asked_by = _CHECKPOINT if by_checkpoint else node.name()
        return super().unpack(packed, asker)

    def unrecognised_bytes(self) -> Counter[str]:
        """Bytes of the class UNKNOWN, by the node that unpacked them in backward."""
        nbytes = Counter({KEPT: self._kept_bytes} if self._kept_bytes else {})
        for piece in self._pieces.values():
            if piece.kind is Saved.UNKNOWN:
                nbytes[piece.asked_by] += piece.nbytes
        return nbytes

    def _projected(self, linear: Linear) -> Linear:
        """Wrap projected layers, so that their saved tensors count as their input."""

        def observed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
            self._projecting = True
            try:
                result = linear(x, weight, bias)
            finally:
                self._projecting = False
            self.lossy += result is not None
            return result

        return observed

    def _note_what_became(self) -> None:
        before, after = Counter({Saved.UNKNOWN: self._kept_bytes}), Counter({Saved.UNKNOWN: self._kept_bytes})
        for piece in self._pieces.values():
            record, piece.record = piece.record, None
            assert record is not None
            for nbytes in (before, after):
                nbytes.update(dict.fromkeys(piece.kinds, 0))
            before[piece.kind] += piece.nbytes
            after[piece.kind] += 0 if record.state is DERIVED else record.nbytes
            self.lossy += record.encoded is not None and not record.encoded.codec.properties.exact
        self.before_bytes, self.after_bytes = _in_order(before), _in_order(after)


def _records(packed: Packed) -> Iterator[Record]:
    """Yield the record of a packed tensor, or those of a wrapper subclass."""
    first: Any = packed[0]
    parts: Any = packed[1]
    if isinstance(first, Record):
        yield first
    elif isinstance(first, Shell):
        for part in parts:
            yield from _records(part)


def _in_order(nbytes: Counter[Saved]) -> dict[Saved, int]:
    return {kind: nbytes[kind] for kind in Saved if kind in nbytes and (nbytes[kind] or kind is not Saved.UNKNOWN)}


def _no_store(on_device: bool) -> Store:
    raise AssertionError("tier keep moves nothing")
