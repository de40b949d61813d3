"""`tba run`: start a program under an allocator that keeps and reuses memory."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Annotated, NoReturn

import typer

from tba._errors import ConfigError

from ._allocators import ALLOCATORS, allocator_environment

# Exit statuses that shells use for a program that is not there, and for one that cannot be run.
_NOT_FOUND, _NOT_RUNNABLE, _BAD_USAGE = 127, 126, 2


def run(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, after `--`.", metavar="COMMAND")],
    allocator: Annotated[str, typer.Option(help=f"One of {', '.join(ALLOCATORS)}.")] = "auto",
) -> None:
    """Start COMMAND under the allocator that keeps a CPU training's memory low without faulting pages twice.

    The program replaces this one: signals reach it and its exit status is what the caller sees.
    """
    try:
        chosen = allocator_environment(allocator)
    except ConfigError as error:
        _give_up(str(error), _BAD_USAGE)
    library = f" ({chosen.library})" if chosen.library else ""
    print(f"tba run: {chosen.name}{library}: {chosen.reason}", file=sys.stderr)
    replace_process(command, {**os.environ, **chosen.environment})


def replace_process(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Become `command`, or exit with the status a shell gives for a program that cannot be started."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them from its start, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        _give_up(
            f"cannot start {command[0]!r}: {error.strerror}; name a program that is on PATH, or its path",
            _NOT_FOUND if missing else _NOT_RUNNABLE,
        )


def _give_up(message: str, status: int) -> NoReturn:
    print(f"tba run: {message}", file=sys.stderr)
    raise typer.Exit(status)
