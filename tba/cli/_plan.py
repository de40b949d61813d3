"""`tba plan`: whether a training fits a machine that you do not have, what it costs, and how long its SSDs last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer

from tba._config import OffloadConfig
from tba._errors import ConfigError
from tba._forecast.forecast import forecast
from tba._forecast.hardware import DEVICES, DISKS, device_named, disk_named
from tba._forecast.here import measure_here
from tba._forecast.observe import observe
from tba._forecast.report import report
from tba._forecast.training import OPTIMIZERS

from ._blame import blaming, refusing
from ._subject import BatchOption, DtypeOption, SequenceOption, subject

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_ABOUT_OPTIMIZERS = "; ".join(f"{each.name}: {each.about}" for each in OPTIMIZERS.values()) + "."


def plan_command(
    model: Annotated[
        str,
        typer.Argument(
            help="A config.json of transformers, its directory, or a model type (llama, gpt2, ...); or "
            "`module:callable`, imported from the working directory and called without arguments, which returns a "
            "model and a batch.",
            metavar="MODEL",
        ),
    ],
    device: Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}; or here: this CPU, measured.")],
    disk: Annotated[
        str, typer.Option(help=f"N SSDs, as {', '.join(f'{name}xN' for name in DISKS)}; none: nothing moves.")
    ] = "gen4x1",
    batch: BatchOption = None,
    sequence: SequenceOption = None,
    dtype: DtypeOption = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a field of the config; may be repeated.", metavar="FIELD=VALUE"),
    ] = None,
    autocast: Annotated[str | None, typer.Option(help="bfloat16 or float16: run forward under autocast.")] = None,
    optimizer: Annotated[str, typer.Option(help=_ABOUT_OPTIMIZERS)] = "adamw",
    shards: Annotated[int, typer.Option(min=1, help="GPUs that share weights, gradients and states (FSDP).")] = 1,
    memory_budget: Annotated[
        str | None, typer.Option(help='Budget of saved tensors, such as "8GiB". Default: all free memory.')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; bytes and seconds.")] = False,
) -> None:
    """Plan a training step of MODEL on a machine that you do not have: memory, time, and bytes written.

    Nothing is allocated, computed or downloaded: the step runs on fake tensors. Exits with status 2 if it cannot be
    planned as asked or does not fit, 1 if the model's own code raises.
    """
    with refusing("tba plan"):
        drives = disk_named(disk)
        machine = measure_here() if device == "here" else device_named(device)
        budget_bytes = None
        if memory_budget is not None:
            budget_bytes = OffloadConfig(tier="auto", memory_budget=memory_budget).memory_budget
        cast, fields = _dtype(autocast), _fields(changes or ())

        def make() -> Any:
            with blaming("tba plan", model):
                return subject(model, batch=batch, sequence=sequence, dtype=dtype, changes=fields)

        with blaming("tba plan", model):
            observed = observe(make, machine, autocast=cast)
        found = forecast(observed, machine, drives, budget_bytes=budget_bytes, optimizer=optimizer, shards=shards)
    print(json.dumps(found.to_dict(), indent=2) if as_json else report(found))


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in _AUTOCAST:
        raise ConfigError(f"--autocast {name!r} is not known: choose of {', '.join(_AUTOCAST)}")
    return None if name is None else _AUTOCAST[name]


def _fields(changes: Sequence[str]) -> dict[str, Any]:
    """Parse field=value; values are JSON, or else text."""
    found: dict[str, Any] = {}
    for change in changes:
        name, given, value = change.partition("=")
        if not given or not name:
            raise ConfigError(f"--set {change!r} is not of the form field=value, such as num_hidden_layers=40")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found
