"""`tba plan`: whether a training fits a machine that you do not have, what it costs, and how long its SSDs last."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Annotated, Any

import typer

from tba._config import OffloadConfig
from tba._forecast.forecast import Forecast, forecast
from tba._forecast.hardware import DEVICES, DISKS, device_named, disk_named
from tba._forecast.here import measure_here
from tba._forecast.observe import observe
from tba._forecast.report import report
from tba._forecast.training import OPTIMIZERS

from ._blame import BAD_USAGE, blaming, refusing
from ._search import BATCH, SEQUENCE, asked, find
from ._subject import (
    ABOUT_MODEL,
    BatchOption,
    ChangesOption,
    DtypeOption,
    SequenceOption,
    dtype_named,
    fields_of,
    subject,
)

_ABOUT_OPTIMIZERS = "; ".join(f"{each.name}: {each.about}" for each in OPTIMIZERS.values()) + "."


def plan_command(
    model: Annotated[
        str,
        typer.Argument(
            help=ABOUT_MODEL,
            metavar="MODEL",
        ),
    ],
    device: Annotated[
        str, typer.Option(help=f"One of {', '.join(DEVICES)}; your own, as 48GiB,165TFLOPS,25GB/s; here: this CPU.")
    ],
    disk: Annotated[
        str,
        typer.Option(
            help=f"N SSDs, as {', '.join(f'{name}xN' for name in DISKS)}; your own, as 5GB/s,6GB/s (write, read); "
            "none: nothing moves to disk."
        ),
    ] = "gen4x1",
    batch: BatchOption = None,
    sequence: SequenceOption = None,
    dtype: DtypeOption = None,
    changes: ChangesOption = None,
    autocast: Annotated[
        str | None, typer.Option(help="bfloat16 (bf16) or float16 (fp16): run forward under autocast.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help=_ABOUT_OPTIMIZERS)] = "adamw",
    shards: Annotated[int, typer.Option(min=1, help="GPUs that share weights, gradients and states (FSDP).")] = 1,
    ranks_per_node: Annotated[
        int, typer.Option(min=1, help="Ranks that share the node's disk (and, on a CPU, memory).")
    ] = 1,
    memory_budget: Annotated[
        str | None, typer.Option(help='Budget of saved tensors, such as "8GiB". Default: all free memory.')
    ] = None,
    find_batch: Annotated[bool, typer.Option("--find-batch", help="Find the largest batch that fits.")] = False,
    find_sequence: Annotated[
        bool, typer.Option("--find-sequence", help=f"Find the longest sequence that fits, in steps of {SEQUENCE.step}.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; bytes and seconds.")] = False,
) -> None:
    """Plan a training step of MODEL on a machine that you do not have: memory, time, and bytes written.

    Nothing is allocated, computed or downloaded: the step runs on fake tensors. Exits with status 2 if it cannot be
    planned as asked or does not fit, 1 if the model's own code raises.
    """
    with refusing("tba plan"):
        drives = disk_named(disk)
        if drives is not None:
            drives = drives.shared(ranks_per_node)
        machine = measure_here() if device == "here" else device_named(device)
        if not machine.like_cuda:
            machine = replace(machine, memory_bytes=machine.memory_bytes // ranks_per_node)
        budget_bytes = None
        if memory_budget is not None:
            budget_bytes = OffloadConfig(tier="auto", memory_budget=memory_budget).memory_budget
        cast = None if autocast is None else dtype_named("--autocast", autocast)
        fields = fields_of(changes or ())

        @cache
        def planned(batch: int | None, sequence: int | None) -> Forecast:
            def make() -> Any:
                return subject(model, batch=batch, sequence=sequence, dtype=dtype, changes=fields)

            seen = observe(make, machine, autocast=cast)
            return forecast(seen, machine, drives, budget_bytes=budget_bytes, optimizer=optimizer, shards=shards)

        search, found = asked(find_batch, find_sequence, batch, sequence), None
        with blaming("tba plan", model):
            if search is BATCH:
                found = find(search, lambda number: planned(number, sequence))
                batch = found.number
            elif search is not None:
                found = find(search, lambda number: planned(batch, number))
                sequence = found.number
            result = planned(batch, sequence)
    if as_json:
        print(json.dumps(result.to_dict() | ({"largest": dict(found.by_policy)} if found else {}), indent=2))
    else:
        print(report(result, model, str(found or "")))
    if result.problem:
        raise typer.Exit(BAD_USAGE)
