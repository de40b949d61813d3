"""Compressor: which codec a tensor gets that several operators save."""

from __future__ import annotations

from collections import deque

import torch

from compact import PRESETS, Saved, key
from tba._compress.compressor import Compressor, _Waiting
from tba._record.record import Record, Remains
from tba._stats import Counters

PRESET = PRESETS["safe8"]
LOSSY, EXACT = Saved.LINEAR_INPUT, Saved.UNKNOWN


def record_of(tensor: torch.Tensor) -> Record:
    return Record(0, tensor, tensor, tensor.untyped_storage(), 0, tensor.nbytes, deque[Remains]())


def test_the_strictest_saver_decides_until_the_codec_has_begun() -> None:
    assert PRESET[LOSSY].properties.kept_bits < PRESET[EXACT].properties.kept_bits
    compressor = Compressor(PRESET, 0, Counters())
    record = record_of(torch.randn(64, 64))
    compressor.choose(record, LOSSY)
    assert compressor.also(record, LOSSY)
    assert record.codec is PRESET[LOSSY]
    assert compressor.also(record, EXACT)
    assert record.codec is PRESET[EXACT]
    assert compressor.also(record, LOSSY)
    assert record.codec is PRESET[EXACT]


def test_a_stricter_saver_gets_its_own_record_while_a_device_is_asked() -> None:
    """The encode that waits goes on with the codec it began with, whatever the record says by then."""
    compressor = Compressor(PRESET, 0, Counters())
    record = record_of(torch.randn(64, 64))
    compressor.choose(record, LOSSY)
    assert record.codec is not None
    pending = record.codec.begin(torch.randn(64, 64), key(0, 0))
    compressor.waiting.append(_Waiting(record.ref, record.codec, pending, torch.zeros(1), None))
    assert compressor.also(record, LOSSY)
    assert not compressor.also(record, EXACT)
    assert record.codec is PRESET[LOSSY]
