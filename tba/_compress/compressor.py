"""Compressor: a record's bytes made smaller once its operator has finished, and given back as they were or nearly.

Guarantees:

1. What a codec makes of a tensor depends on its values, the preset, the seed and its number in the pack sequence, never
   on timing: a tensor that backward wants before it was written goes through the codec all the same.
2. Who saved a tensor decides the codec. A storage that several operators saved gets the strictest of theirs; one that
   was made smaller already serves only savers who need no more, and others get a record of their own.
3. A tensor that would hardly become smaller stays as it is.
4. Nothing waits for a device in forward: where values decide, they are looked at by a later hook, once they are there.

Everything after that (tiers, budgets, statistics) sees the packed bytes only: the record's alias is then a flat byte
tensor of the engine's own, which nobody else can edit.

Wants the engine's lock held, except `unpacked`.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compact import Codec, CodecError, Pending, Preset, Projected, Saved, key
from compact import preset as named

from .._memory import streams
from .._record.encoded import Encoded
from .._record.record import PENDING, Record
from .._stats import Counters
from .calls import SavedBy, kind_of
from .projected_linear import ProjectedLinear

# What is saved must pay for two more passes over the data.
_WORTH = 0.9


class _Waiting(NamedTuple):
    """An encode whose values are still to be looked at."""

    record: weakref.ref[Record]
    codec: Codec
    pending: Pending
    flag: Tensor  # on the host
    there: Any  # event


class Compressor:
    """Applies a preset. Without one nothing is ever smaller."""

    def __init__(self, preset: Preset, seed: int, counters: Counters) -> None:
        self._preset = preset
        self._seed = seed
        self._counters = counters
        self._tells_savers_apart = any(not preset[kind].properties.exact for kind in Saved)
        self._linear: ProjectedLinear | None = None
        self.waiting: list[_Waiting] = []

    def mode(self, model: nn.Module | None) -> SavedBy | None:
        """What tells savers apart and, for projections, takes over linear layers; entered with the hooks.

        None where the preset does not ask for it. Raises ConfigError, RankError: nothing in the model to project.
        """
        if not self._tells_savers_apart:
            return None
        mode = SavedBy(self.projection(model))
        if model is not None:
            weakref.finalize(self, mode.norms(model)).atexit = False
        return mode

    def projection(self, model: nn.Module | None) -> ProjectedLinear | None:
        """What takes over linear layers, where the preset projects their inputs. Raises as `mode`."""
        projected = self._preset[Saved.LINEAR_INPUT]
        if isinstance(projected, Projected):
            self._linear = ProjectedLinear(projected, seed=self._seed, model=model)
        return self._linear

    def end_step(self) -> None:
        """A training step is over: the next one has other projections."""
        if self._linear is not None:
            self._linear.step()

    def kind(self, tensor: Tensor) -> Saved:
        """Who is saving this tensor, in a pack hook."""
        return kind_of(tensor) if self._tells_savers_apart else Saved.UNKNOWN

    def also(self, record: Record, kind: Saved) -> bool:
        """One more operator saves a record's tensor; False where the record has been made too small for it."""
        needed = self._preset[kind]
        if record.codec is None or strictness(needed) <= strictness(record.codec):
            return True
        if record.encoded is not None or record.state is not PENDING or self._is_waiting(record):
            return False
        record.use_codec(needed)
        return True

    def _is_waiting(self, record: Record) -> bool:
        """Whether a codec has begun with it, and will finish."""
        return any(entry.record is record.ref for entry in self.waiting)

    def choose(self, record: Record, kind: Saved) -> None:
        """Settle a new record's codec, for now."""
        record.use_codec(self._preset[kind])

    def encode(self, record: Record) -> bool:
        """Make a record smaller whose operator has finished. False if its values are to be looked at first."""
        alias, codec = record.alias, record.codec
        if codec is None or alias is None or record.is_edited() or not record.is_whole():
            return True
        try:
            with streams.on(record.stream):
                pending = codec.begin(alias, key(self._seed, record.number) if codec.properties.keyed else 0)
                if pending.verbatim:
                    return True
                if record.stream is not None and pending.flag is not None:
                    self.waiting.append(_Waiting(record.ref, codec, pending, *streams.fetch(pending.flag)))
                    return False
                self._finish(record, codec, pending, None)
        except CodecError:  # a dtype or a shape that this codec does not take: the tensor stays as it is
            record.use_codec(None)
        return True

    def settle(self, *, wait: bool) -> list[Record]:
        """Finish the encodes whose values have arrived, of all if `wait`. The records that may now go on."""
        done, waiting, self.waiting = [], self.waiting, []
        for entry in waiting:
            record = entry.record()
            if record is None:
                continue
            if not wait and not entry.there.query():
                self.waiting.append(entry)
                continue
            entry.there.synchronize()
            if record.alias is not None and not record.is_edited():
                with streams.on(record.stream):
                    self._finish(record, entry.codec, entry.pending, entry.flag)
            done.append(record)
        return done

    def _finish(self, record: Record, codec: Codec, pending: Pending, flag: Tensor | None) -> None:
        packed = pending.finish(flag)
        if packed.nbytes > _WORTH * record.nbytes:
            return
        buffers = packed.buffers
        payload = buffers[0] if len(buffers) == 1 else torch.cat(buffers)
        self._counters.encoded_bytes += record.nbytes
        self._counters.packed_bytes += payload.numel()
        sizes = tuple(buffer.numel() for buffer in buffers)
        if record.stream is not None and record.alias is not None:
            streams.goes_early(record.alias, record.stream)
        record.become(payload, Encoded(codec, replace(packed, buffers=()), sizes, record.begin, record.end))


def compressor(
    preset: str | Preset | None, rank: int | float | None, seed: int, counters: Counters
) -> Compressor | None:
    """What the settings ask for; `rank` of the preset "compact"."""
    if preset is None:
        return None
    return Compressor(preset if isinstance(preset, Preset) else named(preset, rank=rank), seed, counters)


def strictness(codec: Codec) -> float:
    """Bits an element keeps, infinite for exact ones: the more, the more savers it serves."""
    properties = codec.properties
    return float("inf") if properties.exact else properties.bits_per_element or 0.0
