"""`tba run`: start a program under an allocator that reuses memory, and offload it without a change of its code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import tba
from tba._config import ATTACH, REPORT
from tba._text import check_page

from ._allocators import ALLOCATORS, allocator_environment
from ._blame import refusing

# Exit statuses of shells for a program that does not exist, and for one that cannot be run.
_NOT_FOUND, _NOT_RUNNABLE = 127, 126


def run(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, after `--`.", metavar="COMMAND")],
    memory_budget: Annotated[
        str | None, typer.Option(help="Attach; saved tensors of each model may hold this much, such as 8GiB.")
    ] = None,
    tier: Annotated[str | None, typer.Option(help="Attach; where saved tensors go: auto, nvme, cpu or keep.")] = None,
    compress: Annotated[str | None, typer.Option(help="Attach; a preset, such as exact or safe8.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Attach; write a page such as out.html when the program ends.")
    ] = None,
    attach: Annotated[bool, typer.Option("--attach", help="Attach, with the settings of TBA_ variables.")] = False,
    allocator: Annotated[str, typer.Option(help=f"One of {', '.join(ALLOCATORS)}.")] = "auto",
) -> None:
    """Start COMMAND under an allocator that keeps the memory of a CPU training low without faulting pages twice.

    With --memory-budget, --tier, --compress, --report or --attach, also offload it, without a change of its code: in
    COMMAND and all Python processes that it starts, each model is attached when it is first trained.

    The program replaces this process: signals reach it, and the caller sees its exit status.
    """
    given = {"memory_budget": memory_budget, "tier": tier, "compress": compress}
    settings = {name: value for name, value in given.items() if value is not None}
    attaching: dict[str, str] = {}
    with refusing("tba run"):
        chosen = allocator_environment(allocator)
        if attach or settings or report is not None:
            attaching = _attaching(settings, report, os.environ)
    library = f" ({chosen.library})" if chosen.library else ""
    if sys.stderr is not None:
        print(f"tba run: {chosen.name}{library}: {chosen.reason}", file=sys.stderr)
    replace_process(command, {**os.environ, **chosen.environment, **attaching})


def _attaching(settings: dict[str, str], report: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Check settings, and return the variables that make the processes of a program attach with them.

    Raises:
        ConfigError: they are wrong, or contradict each other or `TBA_` variables; or the report cannot be written.
        StorageError: the storage path cannot be used.
    """
    checked: Any = settings
    tba.offload_context(None, **checked).close()
    variables = {f"TBA_{name.upper()}": value for name, value in settings.items()} | {ATTACH: "1"}
    if report is not None:
        check_page(report)
        variables[REPORT] = str(report.absolute())
    startup = str(Path(tba.__file__).with_name("_startup"))
    before = environ.get("PYTHONPATH")  # an empty entry of it is the working directory
    there = [path for path in before.split(os.pathsep) if path != startup] if before else []
    return variables | {"PYTHONPATH": os.pathsep.join([startup, *there])}


def replace_process(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Become `command`, or exit with a shell's status for a program that cannot be started."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        why = f"cannot start {command[0]!r}: {error.strerror}; name a program that is on PATH, or its path"
        print(f"tba run: {why}", file=sys.stderr)
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        raise typer.Exit(_NOT_FOUND if missing else _NOT_RUNNABLE) from None
