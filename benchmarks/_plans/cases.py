"""Cases: facts of steps to decide on, recorded from the families of models, or made up as large."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tba import offload_context
from tba._plan.facts import Block, Facts, Link, Place, Saved

from .._report.results import CannotMeasure
from .._workload.families import FAMILIES

_STEPS = 4  # the second is watched, the third begins by plan, and one to spare
# Of the hidden size: what one layer of a Llama saves in bf16, in order of forward.
_LLAMA = (*(1,) * 14, 2, 2, *(1,) * 6, *(3.5,) * 8, *(1,) * 8)
_HIDDEN_BYTES = 2 * 4096 * 4096
_LAYERS, _FORWARD_S, _IN_FLIGHT_BYTES, _AHEAD_BYTES = 264, 60.0, 4 << 30, 4 << 30


def recorded(family: str, scratch: Path, threads: int) -> Facts:
    """Train a family for a few steps under a budget that does not hold; the facts that its plan is made from."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = FAMILIES[family].make(False)
    scratch.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=scratch) as folder,
        offload_context(model, "auto", storage_paths=folder, memory_budget="80MiB") as offload,
    ):
        for number in range(_STEPS):
            model(*FAMILIES[family].batch(number)).backward()
            model.zero_grad(set_to_none=True)
        plan = offload.plan
    offload.close()
    if plan is None:
        raise CannotMeasure(f"{family} was not planned within {_STEPS} steps")
    return plan.facts


def large() -> Facts:
    """A made-up step of 264 alike layers that save 38 storages each: 10,032 in all, 435 GB."""
    saved, blocks = [], []
    total = sum(_LLAMA)
    for layer in range(_LAYERS):
        done = 0.0
        for number, width in enumerate(_LLAMA):
            at = (layer + done / total) / _LAYERS
            wanted_s = 2 * _FORWARD_S * (1 - at)
            saved.append(Saved(Place(layer, number), int(width * _HIDDEN_BYTES), at * _FORWARD_S, wanted_s))
            done += width
        blocks.append(Block(layer / _LAYERS * _FORWARD_S, _FORWARD_S / _LAYERS, _HIDDEN_BYTES))
    link = Link(8e9, 8e9, 0.0, _IN_FLIGHT_BYTES)
    return Facts(tuple(saved), tuple(blocks), _FORWARD_S, 2 * _FORWARD_S, link, _AHEAD_BYTES)
