"""The command line: `python -m benchmarks COMMAND`; `--help` lists the commands."""

from __future__ import annotations

import signal
import sys

import typer

from ._processes.child import ChildError
from ._report.options import command
from ._report.results import CannotMeasure
from .card import card
from .codec import codec
from .curve import curve
from .demo import demo
from .forecast import forecast
from .hooks import hooks
from .io import io
from .links import links
from .overlap import overlap
from .peers import peers
from .ranks import ranks
from .step import step
from .waves import waves

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
for _function in (step, forecast, curve, peers, hooks, links, ranks, overlap, demo, io, codec, waves):
    command(app)(_function)
app.command("card")(card)  # it has no result of its own


def _terminated(number: int, _: object) -> None:
    sys.exit(128 + number)


def main() -> None:
    signal.signal(signal.SIGTERM, _terminated)  # so that processes and files of a benchmark end with it
    try:
        app()
    except (CannotMeasure, ChildError) as error:
        sys.exit(f"benchmarks: {error}")


if __name__ == "__main__":
    main()
