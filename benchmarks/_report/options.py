"""Command-line options that commands share, and what every command ends with: its result is shown and filed."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from .results import Result, file_result, show

MACHINE = f"cpu{os.cpu_count()}"
OUT = Path("out")


def _neutral(machine: str) -> str:
    """Return the name if it may be published: no host name and no path."""
    if not machine.isidentifier() or len(machine) > 16:
        raise typer.BadParameter(f"it becomes public: give a short neutral name such as vm2, not {machine!r}")
    return machine


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output instead of tables.")]
Out = Annotated[Path, typer.Option(help="Folder for pictures and reports.")]
Threads = Annotated[int, typer.Option(min=1, help="Compute threads of each arm.")]
Device = Annotated[
    Literal["cpu", "cuda", "simulated"], typer.Option(help="Where to train; simulated: an accelerator made of a CPU.")
]
Quick = Annotated[
    bool, typer.Option(help="A tiny model and few rounds: shows that the benchmark works, measures nothing.")
]
Save = Annotated[bool, typer.Option("--save/--no-save", help="File the result under benchmarks/results/.")]
Machine = Annotated[
    str, typer.Option(help="Short neutral name of this machine for the result's file, such as vm2.", callback=_neutral)
]
Folder = Annotated[
    Path | None, typer.Option("--path", help="A folder on the disk to use (default: out/scratch).", file_okay=False)
]


def check_names(names: Iterable[str], known: Collection[str], what: str, *, where: str = "") -> None:
    """Refuse an unknown name. Raises BadParameter."""
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"unknown {what} {name!r}{where}; known are {', '.join(known)}")


def parse_rate(text: str) -> float:
    """Parse bytes per second, such as `200MB` (10^6) or `1GiB` (2^30), with or without `/s`. Raises BadParameter."""
    try:
        rate = float(TypeAdapter(ByteSize).validate_python(text.strip().removesuffix("/s")))
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is not a rate; write bytes per second such as 200MB or 1GiB") from None
    if rate <= 0:
        raise typer.BadParameter(f"a rate must be above zero, got {text!r}")
    return rate


def command(app: typer.Typer) -> Callable[[Callable[..., Result]], None]:
    """Make a function a command of `app`: its own options, and --json, --save and --machine for its result."""

    def register(function: Callable[..., Result]) -> None:
        def run(json: AsJson = False, save: Save = False, machine: Machine = MACHINE, **options: Any) -> None:
            finish(function(**options), json, save, machine)

        *shared, _ = inspect.signature(run, eval_str=True).parameters.values()
        own = inspect.signature(function, eval_str=True).parameters.values()
        run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]  # typer reads it
        app.command(function.__name__, help=function.__doc__)(run)

    return register


def finish(result: Result, as_json: bool, save: bool, machine: str) -> None:
    """Show the result; with `save` also file it."""
    show(result, as_json=as_json)
    if save:
        for path in file_result(result, machine):
            print(f"filed {path.name}", file=sys.stderr)
