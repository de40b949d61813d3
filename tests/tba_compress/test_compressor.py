"""Compressor: which codec a tensor gets that several operators save."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compact import PRESETS, Saved, key
from support.engine import engine, save
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
    assert record.is_where_it_was()
    record.examine(True)
    compressor.waiting.append(_Waiting(record.ref, record.codec, pending, torch.zeros(1), None))
    assert not record.is_where_it_was()  # an alias that has been edited by a counter of its own has other bytes
    assert compressor.also(record, LOSSY)
    assert not compressor.also(record, EXACT)
    assert record.codec is PRESET[LOSSY]


class _Late(Compressor):
    """Decides as on a device: what decides is on the host only when it is waited for."""

    def encode(self, record: Record) -> bool:
        codec = record.codec
        assert codec is not None
        assert record.alias is not None
        pending = codec.begin(record.alias, 0)
        there = SimpleNamespace(query=lambda: False, synchronize=lambda: None)
        record.examine(True)
        self.waiting.append(_Waiting(record.ref, codec, pending, torch.as_tensor(pending.flag), there))
        return False


@pytest.mark.parametrize("tier", ["nvme", "keep"])
def test_what_backward_wants_before_a_device_has_decided(tier: str, scratch: Path) -> None:
    """The last tensor of a forward is asked for while its operator counts as running."""
    leaf = torch.randn(64, 64).bfloat16().float().requires_grad_()
    x = leaf * 1
    with engine(scratch, tier=tier, compress="exact") as offload:
        compressor = offload._saver.compressor
        assert compressor is not None
        compressor.__class__ = _Late
        with offload:
            save(x).sum().backward()
        stats = offload.stats()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, 2 * leaf.detach())
    assert 0 < stats.packed_bytes < stats.encoded_bytes == leaf.nbytes
    assert stats.live_records == stats.resident_bytes == 0
