"""The typer application: one sub-command a file."""

from __future__ import annotations

import typer

from ._audit import audit_command
from ._doctor import doctor
from ._run import run

app = typer.Typer(
    help="Take the activations of PyTorch training out of the way and bring them back in time.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

# Options end at the first word that is none of ours, so that the program's own need no `--` before them.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(doctor)
app.command("audit")(audit_command)
