"""Command-line options that commands share, and the end of every command: the result is shown and filed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from .results import Result, check_machine, file_result, show

MACHINE = f"cpu{os.cpu_count()}"


def _neutral(machine: str) -> str:
    try:
        return check_machine(machine)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output instead of tables.")]
Quick = Annotated[bool, typer.Option(help="A tiny model and few rounds: shows that all works, measures nothing.")]
Save = Annotated[bool, typer.Option("--save/--no-save", help="File the result under benchmarks/results/.")]
Machine = Annotated[
    str, typer.Option(help="Short neutral name of this machine for the result's file, such as vm2.", callback=_neutral)
]
Folder = Annotated[
    Path | None, typer.Option("--path", help="A folder on the disk to use (default: out/scratch).", file_okay=False)
]


def finish(result: Result, as_json: bool, save: bool, machine: str) -> None:
    """Show the result and, if asked to, file it."""
    show(result, as_json=as_json)
    if save:
        for path in file_result(result, machine):
            print(f"filed {path.name}", file=sys.stderr)
