"""Rehearsal: saved-tensor hooks that send each tensor through the codec its class has in a preset, and count bytes.

Nothing is offloaded. A forward packs aliases, `encode` turns them into the codecs' forms when the forward is over, a
backward gets what the codecs decode. Encoding waits for the end because pack runs before the operator's own kernel,
which may still fill what was saved, and because who else saves the same memory is only known then.

Assumption: hooks are pushed for one forward on one thread; unpack may run on autograd's device threads.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from compact import Codec, CodecError, Exact, Packed, Preset, Saved, UnsupportedTensor, WeightGradCodec
from compact import key as derive

from ._compress import strictness
from ._errors import ConfigError
from ._kinds import is_weight
from ._quiet import quiet
from ._saved_by import kind_of
from ._torch import current_node
from ._view import View, span

NEVER_ASKED, KEPT = "never asked for", "kept as they are"
_CHECKPOINT = "torch.utils.checkpoint"

# Strictest first: the class that counts for what operators of several classes saved. The bits of every preset fall in
# this order too.
_STRICTEST_FIRST = (
    *(Saved.UNKNOWN, Saved.INDEX, Saved.PROBABILITIES, Saved.ATTENTION_STATISTICS, Saved.NORM_STATISTICS, Saved.MASK),
    *(Saved.ATTENTION, Saved.NORM_INPUT, Saved.ACTIVATION_INPUT, Saved.PRODUCT_FACTOR, Saved.LINEAR_INPUT),
)

# Which elements of its storage a tensor has: the first one's index, and (stride, size) of its dimensions, outermost
# first, those of stride 0 left out and neighbours joined. Equal for every reshape and transpose of one piece of memory.
Cells = tuple[int, tuple[tuple[int, int], ...]]


def cells(tensor: Tensor) -> Cells:
    """The cells of a strided tensor. Shape and order of its dimensions do not matter."""
    dims: list[tuple[int, int]] = []
    for stride, size in sorted(
        ((st, n) for st, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1 and st), reverse=True
    ):
        if dims and dims[-1][0] == stride * size:
            dims[-1] = (stride, dims[-1][1] * size)
        else:
            dims.append((stride, size))
    return int(tensor.storage_offset()), tuple(dims)


def strictest(codecs: list[Codec]) -> Codec:
    """The codec that keeps most: an exact one, else more bits, else the one without noise."""

    return max(codecs, key=lambda codec: (strictness(codec), not codec.properties.keyed))


class Piece:
    """Some elements of one storage at one version, and what the codecs made of them.

    Attributes:
        alias: detached, as saved first; dimensions of stride 0 (expanded) reduced to one element. None once encoded.
        kinds: of all that was saved of it.
        asked_by: the first node of autograd that asked for it.
        forms: (codec, packed form) by class. Classes that share a form have the same objects.
    """

    __slots__ = ("alias", "asked_by", "cells", "dense", "forms", "kinds", "nbytes", "number", "offset", "span")

    def __init__(self, number: int, tensor: Tensor) -> None:
        alias = tensor.detach()
        for dim, stride in enumerate(alias.stride()):
            if not stride and alias.shape[dim] > 1:
                alias = alias.narrow(dim, 0, 1)
        begin, end = span(alias, View.of(alias))
        if alias.nbytes > end - begin:  # overlapping windows (`unfold`): the memory under them
            alias = alias.as_strided(((end - begin) // alias.itemsize,), (1,))
        self.number = number
        self.alias: Tensor | None = alias
        self.offset = int(alias.storage_offset())
        self.cells = cells(alias)
        self.span = begin, end
        self.nbytes = alias.nbytes
        self.dense = self.span[1] - self.span[0] == self.nbytes
        self.kinds: set[Saved] = set()
        self.asked_by = NEVER_ASKED
        self.forms: dict[Saved, tuple[Codec, Packed]] = {}

    @property
    def kind(self) -> Saved:
        """The class it counts for."""
        return next(kind for kind in _STRICTEST_FIRST if kind in self.kinds)

    def covers(self, tensor: Tensor) -> bool:
        """Whether every element of `tensor`, a view of the same storage and dtype, is an element of this piece."""
        if cells(tensor) == self.cells:
            return True
        begin, end = span(tensor, View.of(tensor))
        return self.dense and self.span[0] <= begin and end <= self.span[1]


class Handle(NamedTuple):
    """What pack gives to autograd."""

    piece: Piece
    kind: Saved
    view: View


class Rehearsal:
    """`pack` and `unpack` for `torch.autograd.graph.saved_tensors_hooks`, for one forward and backward.

    Args:
        preset: the codec of each class.
        seed: the codecs' noise is made of it and of the order of saving.

    Attributes:
        weight_bytes, duplicate_bytes: saved, but weights, and saved again.
        lossy: how many pieces went through a codec that is not exact.
    """

    def __init__(self, preset: Preset, seed: int) -> None:
        self.weight_bytes = self.duplicate_bytes = self.lossy = 0
        self._kept_bytes = 0
        self._preset = preset
        self._seed = seed
        self._pieces: list[Piece] = []
        # By storage object, version and dtype. The pieces' aliases keep the storages alive, so no address comes twice.
        self._known: dict[tuple[int, int, torch.dtype], list[Piece]] = {}

    def pack(self, tensor: Tensor) -> Handle | Tensor:
        """Called by autograd with each tensor it saves."""
        kind = kind_of(tensor)
        with quiet(), torch.no_grad():
            return self._pack(tensor, kind)

    def unpack(self, packed: Handle | Tensor) -> Tensor:
        """Called by autograd whenever it wants a saved tensor."""
        if isinstance(packed, Tensor):
            return packed
        piece, kind, view = packed
        if piece.asked_by is NEVER_ASKED and kind is Saved.UNKNOWN and (node := current_node()) is not None:
            # A checkpoint asks for the inputs of what it runs again while some node within is waiting for its own.
            asker = str(sys._getframe(1).f_globals.get("__name__"))
            piece.asked_by = _CHECKPOINT if asker == _CHECKPOINT else node.name()
        with quiet(), torch.no_grad():
            self._encode(piece)
            codec, form = piece.forms[kind]
            return codec.decode(form).as_strided(view.size, view.stride, view.offset - piece.offset)

    def encode(self) -> None:
        """Encode all that was saved, and let go of the originals. To be called when the forward is over.

        Raises:
            ConfigError: a codec that cannot take a tensor of its class, such as a rank above the width.
        """
        with quiet(), torch.no_grad():
            for piece in self._pieces:
                self._encode(piece)
        for piece in self._pieces:
            piece.alias = None

    def before_bytes(self) -> dict[Saved, int]:
        """By class, what was saved and is no weight, each element once; 0 for a class whose all counts for another."""
        nbytes = Counter({Saved.UNKNOWN: self._kept_bytes})
        for piece in self._pieces:
            nbytes.update(dict.fromkeys(piece.kinds, 0))
            nbytes[piece.kind] += piece.nbytes
        return _in_order(nbytes)

    def after_bytes(self) -> dict[Saved, int]:
        """By class, what the codecs made of it. A form that several classes share counts for the strictest."""
        nbytes = Counter({Saved.UNKNOWN: self._kept_bytes})
        for piece in self._pieces:
            nbytes.update(dict.fromkeys(piece.kinds, 0))
            for kinds in self._sharing(piece.kinds):
                nbytes[kinds[0]] += piece.forms[kinds[0]][1].nbytes
        return _in_order(nbytes)

    def unrecognised_bytes(self) -> Counter[str]:
        """Of the class UNKNOWN, by the node that asked for it in backward."""
        nbytes = Counter({KEPT: self._kept_bytes} if self._kept_bytes else {})
        for piece in self._pieces:
            if piece.kind is Saved.UNKNOWN:
                nbytes[piece.asked_by] += piece.nbytes
        return nbytes

    def _pack(self, tensor: Tensor, kind: Saved) -> Handle | Tensor:
        if is_weight(tensor):
            self.weight_bytes += tensor.nbytes
            return tensor.detach()
        storage = _storage(tensor)
        if storage is None:
            self._kept_bytes += _nbytes(tensor)
            return tensor.detach()
        known = self._known.setdefault((storage._cdata, tensor._version, tensor.dtype), [])
        piece = next((piece for piece in known if piece.covers(tensor)), None)
        if piece is None:
            piece = Piece(len(self._pieces), tensor)
            known.append(piece)
            self._pieces.append(piece)
        else:
            self.duplicate_bytes += tensor.nbytes
        piece.kinds.add(kind)
        return Handle(piece, kind, View.of(tensor))

    def _encode(self, piece: Piece) -> None:
        if piece.kinds <= piece.forms.keys():
            return
        assert piece.alias is not None
        number = derive(self._seed, piece.number)
        for kinds in self._sharing(piece.kinds):
            codec = strictest([self._preset[kind] for kind in kinds])
            try:
                try:
                    form = codec.encode(piece.alias, number)
                except UnsupportedTensor:  # such as a complex one
                    codec = Exact()
                    form = codec.encode(piece.alias)
            except CodecError as error:
                label = f"{str(piece.alias.dtype).removeprefix('torch.')}{list(piece.alias.shape)}"
                raise ConfigError(
                    f"preset {self._preset.name!r} cannot be audited on this model: {error} (a saved {label} of class "
                    f"{kinds[0].value}); name another codec for that class with Preset.override"
                ) from error
            self.lossy += not codec.properties.exact
            piece.forms.update(dict.fromkeys(kinds, (codec, form)))

    def _sharing(self, kinds: set[Saved]) -> list[list[Saved]]:
        """Which classes share one form: all, but linear layers that save a projection of their own."""
        own = isinstance(self._preset[Saved.LINEAR_INPUT], WeightGradCodec) and Saved.LINEAR_INPUT in kinds
        rest = [kind for kind in _STRICTEST_FIRST if kind in kinds and not (own and kind is Saved.LINEAR_INPUT)]
        return [group for group in (rest, [Saved.LINEAR_INPUT] if own else []) if group]


def _in_order(nbytes: Mapping[Saved, int]) -> dict[Saved, int]:
    return {kind: nbytes[kind] for kind in Saved if kind in nbytes and (nbytes[kind] or kind is not Saved.UNKNOWN)}


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor that codecs take; None for subclasses, sparse, quantized, empty and wrapped ones."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    if not plain or tensor.device.type == "meta" or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return None
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # functorch wrappers, zero tensors
        return None


def _nbytes(tensor: Tensor) -> int:
    try:
        return tensor.numel() * tensor.itemsize
    except RuntimeError:  # an opaque tensor may have no count of elements
        return 0
