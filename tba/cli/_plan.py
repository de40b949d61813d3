"""`tba plan`: whether a training fits a machine that you do not have, what it costs, and how long its SSDs last."""

from __future__ import annotations

import json
from functools import cache
from typing import Annotated, Any

import typer

from tba._config import OffloadConfig
from tba._forecast.group import group_of
from tba._forecast.hardware import DEVICES, DISKS, device_named, disk_named
from tba._forecast.here import measure_here
from tba._forecast.observe import observe
from tba._forecast.report import report
from tba._forecast.together import Together, forecast_together
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
    world: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks that train. Default: --fsdp times --tp, or as many times that as fill nodes."),
    ] = None,
    fsdp: Annotated[
        int,
        typer.Option("--fsdp", "--shards", min=1, help="Ranks that share weights, gradients and states (FSDP)."),
    ] = 1,
    tp: Annotated[
        int, typer.Option(min=1, help="Ranks that share layers (tensor parallelism), by the model's tp_plan.")
    ] = 1,
    ranks_per_node: Annotated[
        int, typer.Option(min=1, help="Ranks that share the node's disk (and, on a CPU, memory).")
    ] = 1,
    memory_budget: Annotated[
        str | None, typer.Option(help='Budget of saved tensors of each rank, such as "8GiB". Default: all free memory.')
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
        group = group_of(world, fsdp, tp, ranks_per_node)
        drives = disk_named(disk)
        machine = measure_here() if device == "here" else device_named(device)
        budget_bytes = None
        if memory_budget is not None:
            budget_bytes = OffloadConfig(tier="auto", memory_budget=memory_budget).memory_budget
        cast = None if autocast is None else dtype_named("--autocast", autocast)
        fields = fields_of(changes or ())

        @cache
        def planned(batch: int | None, sequence: int | None) -> Together:
            def make() -> Any:
                return subject(model, batch=batch, sequence=sequence, dtype=dtype, changes=fields)

            seen = observe(make, machine, autocast=cast, tensor=tp)
            return forecast_together(seen, machine, drives, group, budget_bytes=budget_bytes, optimizer=optimizer)

        search, found = asked(find_batch, find_sequence, batch, sequence), None
        with blaming("tba plan", model):
            if search is BATCH:
                found = find(search, lambda number: planned(number, sequence).hardest)
                batch = found.number
            elif search is not None:
                found = find(search, lambda number: planned(batch, number).hardest)
                sequence = found.number
            result = planned(batch, sequence)
    if as_json:
        print(json.dumps(result.to_dict() | ({"largest": dict(found.by_policy)} if found else {}), indent=2))
    else:
        print(report(result, model, str(found or "")))
    if result.hardest.problem:
        raise typer.Exit(BAD_USAGE)
