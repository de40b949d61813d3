"""Heap: when a user is told that glibc keeps what offloading freed, and that the count is glibc's own."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from support.engine import activation, chain, engine
from tba._memory import heap as heap_file
from tba._memory.heap import Heap, advice

MIB = 1 << 20


@pytest.mark.parametrize(
    ("retained", "written", "told"),
    [
        (300 * MIB, 750 * MIB, True),
        (65 * MIB, 100 * MIB, True),
        (64 * MIB, 100 * MIB, False),  # too little to matter
        (187 * MIB, 750 * MIB, False),  # less than a quarter
        (188 * MIB, 750 * MIB, True),
    ],
)
def test_what_is_worth_a_word(retained: int, written: int, told: bool) -> None:
    assert bool(advice(retained, written, ["python"])) is told


def test_the_line_says_what_was_found_and_what_to_type() -> None:
    line = advice(338 * MIB, 752 * MIB, ["python", "-m", "my train", "--lr", "1"])
    assert "keeps 338.0 MiB of freed memory at the end of a step that wrote 752.0 MiB" in line
    assert line.endswith(": tba run -- python -m 'my train' --lr 1")


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ran in this process before: where CUDA has begun, the heap is not looked at."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


class Probe:
    """A heap that retains what a test says."""

    def __init__(self, retained: list[int]) -> None:
        self.retained = retained

    def __call__(self) -> int:
        return self.retained.pop(0)


@pytest.mark.parametrize(
    ("retained", "written", "environ", "told", "looks"),
    [
        ([300, 300, 300, 300], [100, 100, 100, 100], {}, 1, 1),  # once
        ([20, 300, 300, 300], [100, 100, 100, 100], {}, 1, 2),  # the first step need not show it
        ([20, 20, 20, 300], [100, 100, 100, 100], {}, 0, 3),  # nobody is watched for ever
        ([300, 300, 300, 300], [0, 0, 0, 100], {}, 1, 1),  # steps that wrote nothing are not looked at
        ([300], [100], {"LOCAL_RANK": "1"}, 0, 0),
        ([300], [100], {"LOCAL_RANK": "0"}, 1, 1),
    ],
)
def test_it_is_said_once_in_the_first_steps(
    retained: list[int],
    written: list[int],
    environ: Mapping[str, str],
    told: int,
    looks: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    probe = Probe([nbytes * MIB for nbytes in retained])
    heap = Heap(probe, environ)
    for nbytes in written:
        heap.end_step(nbytes * MIB)
    assert len(caplog.records) == told
    assert len(retained) - len(probe.retained) == looks
    assert all((r.name, r.levelno) == ("tba", logging.WARNING) for r in caplog.records)


def test_a_training_on_a_gpu_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heap_file, "active", lambda: ("cuda", torch.cuda))
    Heap(lambda: 300 * MIB).end_step(100 * MIB)
    assert caplog.records == []


def test_the_engine_looks_at_the_end_of_each_step(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heap_file, "heap", Heap(Probe([20 * MIB, 300 * MIB])))
    with engine(scratch, prefetch_bytes=0) as offload:
        for _ in range(3):
            leaf, x = activation(1 << 18)
            with offload:
                y = chain(x, 4)
                offload.flush()
                y.sum().backward()
            assert len(caplog.records) == (0 if offload.stats().steps < 2 else 1)
            del leaf, x, y
    (record,) = caplog.records
    assert "keeps 300.0 MiB of freed memory at the end of a step that wrote 4.0 MiB" in record.getMessage()
    assert sys.orig_argv[-1].split()[0] in record.getMessage()


def test_the_count_is_what_lies_free_between_live_blocks() -> None:
    library = ctypes.CDLL(None)
    if any(hasattr(library, name) for name in ("mallctl", "mi_collect")) or not hasattr(library, "mallinfo2"):
        pytest.skip("this process does not run on glibc's allocator, or on one from before 2.33")
    nbytes, count = 64 << 10, 512  # below the least threshold from which blocks leave the heap
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(nbytes) for _ in range(count)]
    before = heap_file.heap._retained_bytes()
    for block in blocks[::2]:
        library.free(block)
    after = heap_file.heap._retained_bytes()
    for block in blocks[1::2]:
        library.free(block)
    assert after - before >= nbytes * count // 2
