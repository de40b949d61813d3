"""Application of typer: its options, and a command from each file."""

from __future__ import annotations

from typing import Annotated

import typer

import tba

from ._audit import audit_command
from ._doctor.command import doctor
from ._plan import plan_command
from ._run import run
from ._usage import Commands

app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tba {tba.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Offload the activations of PyTorch training and prefetch them for backward."""


# Our options end at the first other word, so that the program's own options need no `--` before them.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(doctor)
app.command("audit")(audit_command)
app.command("plan")(plan_command)
