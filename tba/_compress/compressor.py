"""Compressor: encodes a record's bytes by a preset once its operator has finished.

Guarantees:

1. The encoded bytes depend on the tensor's values, the preset, the seed and the record's number in the pack sequence,
   never on timing: a tensor that backward asks for before it is written still goes through its codec.
2. The class of the operator that saved a tensor decides the codec. A storage that several operators saved gets the
   strictest of their codecs. Once encoded, it serves only operators whose codec is no stricter; others get a record of
   their own.
3. A tensor that would hardly shrink stays as it is. So does one whose storage was resized or replaced since it was
   saved: it is then an alias, as without compression.
4. Forward never waits for a device: if values decide, a later hook reads the flag once it is on the host.

Tiers, budgets and statistics see only the encoded bytes: the record's alias is then a flat byte tensor that the engine
owns and nobody else can edit.

Assumption: callers hold the engine's lock.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compact import Codec, CodecError, Pending, Preset, Projected, Sampled, Saved, key
from compact import preset as named

from .._device import streams
from .._memory import shortage
from .._record.encoded import Encoded
from .._record.record import PENDING, Record
from .._stats import Counters
from .._torch import private
from .._torch.user_frames import Notices
from .calls import SavedBy, kind_of
from .projected_linear import ProjectedLinear

_CODEC_TURNS = 2  # unpacking a tensor takes about as long as packing it
_LEAST_LOSS = 0.02  # share of a step below which nothing is said
_WORTH = 0.9  # largest share of the bytes to keep: the savings must pay for two more passes over the data


def advice(preset: str, codec_s: float, gain_s: float, step_s: float) -> str:
    """Compose the line that says what a preset costs; "" if it costs no more than a little of the step.

    Args:
        preset: its name.
        codec_s: time of a step for packing, unpacking and recomputing tensors.
        gain_s: what moving the bytes saved by these would cost the step.
        step_s: how long the step takes.
    """
    if codec_s - gain_s <= _LEAST_LOSS * step_s:
        return ""
    return (
        f"compress={preset!r}: packing, unpacking and recomputing tensors take {codec_s / step_s:.0%} of a step; the "
        f"bytes they save would take {gain_s / step_s:.0%} to write and read back, because the disk keeps up. The step "
        "is faster without compress=, though compress= spares the disk those bytes"
    )


class _Waiting(NamedTuple):
    """An encode whose flag is still being copied to the host."""

    record: weakref.ref[Record]
    codec: Codec
    pending: Pending
    flag: Tensor  # on the host
    there: Any  # event


class Compressor:
    """Chooses and applies the codecs of a preset.

    Attributes:
        name: of the preset.
        lossy: at least one of them is; then the operator that saved a tensor matters.
    """

    def __init__(self, preset: Preset, seed: int, counters: Counters) -> None:
        self.name = preset.name
        self._preset = preset
        self._seed = seed
        self._counters = counters
        self.lossy = any(not preset[kind].properties.exact for kind in Saved)
        self._linear: ProjectedLinear | None = None
        self.waiting: deque[_Waiting] = deque()
        self._notices = Notices()
        self._spared_bytes, self._encode_s, self._begun_s = 0, 0.0, 0.0  # of this step, and when it began

    def mode(self, model: nn.Module | None) -> SavedBy | None:
        """Make the torch-function mode to enter with the hooks; None if the preset needs none.

        It notes which function is saving and, if the preset projects or samples linear inputs, replaces linear layers.

        Raises:
            ConfigError: a projection, but no linear layer in the model.
            RankError: a rank above the width of a layer.
        """
        if not self.lossy or not private.has(private.Feature.LOSSY):
            return None
        mode = SavedBy(self.projection(model))
        if model is not None:
            mode.remove = mode.norms(model)
            weakref.finalize(self, mode.remove).atexit = False
        return mode

    def projection(self, model: nn.Module | None) -> ProjectedLinear | None:
        """Make the replacement of linear layers; None if the preset has none. Raises as `mode` does."""
        projected = self._preset[Saved.LINEAR_INPUT]
        if isinstance(projected, Projected | Sampled):
            self._linear = ProjectedLinear(projected, seed=self._seed, model=model)
        return self._linear

    def end_step(self, further_byte_s: float, derive_s: float, derived_bytes: int) -> None:
        """End a training step: the next one gets new projections. Say once if a lossy preset costs more than it saves.

        Args:
            further_byte_s: what another byte written and read back costs the step; 0 if unknown.
            derive_s, derived_bytes: what recomputing tensors from others costs the step, and their bytes.
        """
        if self._linear is not None:
            self._linear.step()
        now_s = time.perf_counter()
        if further_byte_s and self.lossy:
            codec_s = _CODEC_TURNS * self._encode_s + derive_s
            gain_s = (self._spared_bytes + derived_bytes) * further_byte_s
            if line := advice(self._preset.name, codec_s, gain_s, now_s - self._begun_s):
                self._notices.say("preset", line, level=logging.WARNING)
        self._spared_bytes, self._encode_s, self._begun_s = 0, 0.0, now_s

    def kind(self, tensor: Tensor) -> Saved:
        return kind_of(tensor) if self.lossy else Saved.UNKNOWN

    def also(self, record: Record, kind: Saved) -> bool:
        """Note another operator that saves a record's tensor. False if the record has already lost too much for it."""
        needed = self._preset[kind]
        if record.codec is None or needed.properties.kept_bits <= record.codec.properties.kept_bits:
            return True
        if record.encoded is not None or record.state is not PENDING or record.examined:
            return False
        record.use_codec(needed)
        return True

    def choose(self, record: Record, kind: Saved) -> None:
        """Give a new record the codec of its class; `also` may change it."""
        record.use_codec(self._preset[kind])

    def encode(self, record: Record) -> bool:
        """Encode a record whose operator has finished. False if its flag must reach the host first."""
        alias, codec = record.alias, record.codec
        if codec is None or alias is None or record.is_edited() or record.was_moved() or not record.is_whole():
            return True
        begun_s = time.perf_counter()
        try:
            with streams.on(record.stream):
                pending = codec.begin(alias, key(self._seed, record.number) if codec.properties.keyed else 0)
                if pending.verbatim:
                    return True
                if record.stream is not None and pending.flag is not None:
                    record.examine(True)
                    self.waiting.append(_Waiting(record.ref, codec, pending, *streams.fetch(pending.flag)))
                    return False
                self._finish(record, codec, pending, None)
        except CodecError:  # a dtype or shape that this codec does not take: the tensor stays as it is
            record.use_codec(None)
        except shortage.ENDS as error:  # no memory for the packed bytes: likewise
            if not shortage.lacks_memory(error):
                raise
            record.use_codec(None)
        finally:
            if record.stream is None:  # a device only queues it
                self._encode_s += time.perf_counter() - begun_s
        return True

    def settle(self, *, wait: bool) -> list[Record]:
        """Finish the encodes whose flags have arrived, or all if `wait`. Return the records that may proceed."""
        done: list[Record] = []
        while self.waiting and (wait or self.waiting[0].there.query()):
            entry = self.waiting.popleft()
            record = entry.record()
            if record is None:
                continue
            entry.there.synchronize()
            record.examine(False)
            if record.state is not PENDING:  # backward has had it
                continue
            if record.alias is not None and not record.is_edited() and not record.was_moved():
                try:
                    with streams.on(record.stream):
                        self._finish(record, entry.codec, entry.pending, entry.flag)
                except shortage.ENDS as error:
                    if not shortage.lacks_memory(error):
                        raise
                    record.use_codec(None)
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
        self._spared_bytes += record.nbytes - payload.numel()
        sizes = tuple(buffer.numel() for buffer in buffers)
        if record.stream is not None and record.alias is not None:
            streams.goes_early(record.alias, record.stream)
        record.become(payload, Encoded(codec, replace(packed, buffers=()), sizes, record.begin, record.end))


def compressor(
    preset: str | Preset | None, rank: int | float | None, seed: int, counters: Counters
) -> Compressor | None:
    """Make the compressor that the settings ask for; None without a preset. `rank` belongs to the preset "compact"."""
    if preset is None:
        return None
    return Compressor(preset if isinstance(preset, Preset) else named(preset, rank=rank), seed, counters)
