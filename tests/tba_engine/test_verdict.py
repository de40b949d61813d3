"""Verdict: what the engine counts for it, where stores fail, codecs shrink in place, and steps have several parts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from io_backends.testing import Fault
from support.engine import ALL_INT8, activation, chain, engine
from support.planned import ROWS, SLOW, Training
from tba import Offloader, offload_context

MIB = 1 << 20


def _no_write(operation: str, number: int) -> Fault | None:
    return Fault(error=OSError(28, "No space left")) if operation == "write" else None


@pytest.mark.filterwarnings("ignore::tba.OffloadWarning")
@pytest.mark.parametrize(
    ("settings", "plan", "flush", "line"),
    [
        ({}, None, True, "saved tensors 8 -> 8 MiB (0%), waited "),
        ({"prefetch_bytes": "64MiB"}, None, False, "saved tensors 8 MiB, all held back in memory: nothing was written"),
        ({"prefetch_bytes": 0}, _no_write, True, "saved tensors 8 MiB, all in memory: write failed; "),
        ({"tier": "keep"}, None, False, "saved tensors 8 MiB, all in memory: tier keep"),
        ({"tier": "cpu"}, None, False, "saved tensors 8 MiB, all in memory: already in host memory"),
        ({"tier": "keep", "compress": ALL_INT8}, None, False, "saved tensors 8 -> 3.6 MiB (-55%), waited "),
        ({"tier": "auto"}, None, False, "saved tensors 8 MiB, all in memory: they fit"),
        ({"min_tensor_bytes": "2MiB"}, None, False, "saved tensors 8 MiB, all in memory: below min_tensor_bytes"),
    ],
)
def test_the_figures_are_those_of_the_last_step(
    scratch: Path, settings: dict[str, Any], plan: Any, flush: bool, line: str
) -> None:
    with engine(scratch, plan, **settings) as offload:
        for _ in range(2):  # forwards and backwards
            _, x = activation(1 << 18)
            with offload:
                y = chain(x)
            if flush:
                offload.flush()
            y.sum().backward()
            stats = offload.stats()
    assert stats.verdict.startswith(line), stats.verdict
    assert stats.plain_peak_bytes == 8 * MIB
    assert stats.last_step is not None
    assert stats.last_step.verdict.startswith(line.partition(";")[0])


def test_of_several_micro_batches_the_largest_counts(scratch: Path) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with engine(scratch) as offload:
        for lengths in ((2, 2), (8, 3), (1, 4)):
            for length in lengths:
                with offload:
                    y = chain(torch.ones(1 << 18) * weight, length)
                y.sum().backward()
            optimizer.step()
            stats = offload.stats()
            assert stats.plain_peak_bytes == (max(lengths) + 1) * MIB


def _verdicts(offload: Offloader, training: Training, rows: int, steps: int = 1) -> str:
    for number in range(steps):
        with offload:
            training.step(rows, number)
    return offload.stats().verdict


def test_a_step_of_another_kind_is_not_told_by_the_plan_before(scratch: Path) -> None:
    training = Training()
    offload = offload_context(training.model, memory_budget="6MiB", storage_paths=scratch, min_tensor_bytes=4096)
    assert "->" in _verdicts(offload, training, ROWS, 5)
    assert offload.plan
    assert re.fullmatch(r"saved tensors \d+ KiB, all in memory: they fit", _verdicts(offload, training, 4))
    assert "->" in _verdicts(offload, training, ROWS)
    offload.close()


def test_what_is_too_small_to_move_counts_once_where_blocks_are_tried_and_where_they_recompute(scratch: Path) -> None:
    training, figures = Training(), set[int]()
    settings: dict[str, Any] = {"storage_paths": scratch, "min_tensor_bytes": "300KiB", **SLOW}
    offload = offload_context(training.model, memory_budget="3MiB", **settings)
    for _ in range(6):
        _verdicts(offload, training, ROWS)
        figures.add(offload.stats().plain_peak_bytes)
    assert offload.plan
    assert offload.plan.recomputed
    assert len(figures) == 1
    offload.close()
