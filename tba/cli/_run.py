"""`tba run`: start a program under an allocator that keeps and reuses memory."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Annotated, NoReturn

import typer

from ._allocators import ALLOCATORS, allocator_environment
from ._blame import refusing

# Exit statuses of shells for a program that does not exist, and for one that cannot be run.
_NOT_FOUND, _NOT_RUNNABLE = 127, 126


def run(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, after `--`.", metavar="COMMAND")],
    allocator: Annotated[str, typer.Option(help=f"One of {', '.join(ALLOCATORS)}.")] = "auto",
) -> None:
    """Start COMMAND under an allocator that keeps the memory of a CPU training low without faulting pages twice.

    The program replaces this process: signals reach it, and the caller sees its exit status.
    """
    with refusing("tba run"):
        chosen = allocator_environment(allocator)
    library = f" ({chosen.library})" if chosen.library else ""
    print(f"tba run: {chosen.name}{library}: {chosen.reason}", file=sys.stderr)
    replace_process(command, {**os.environ, **chosen.environment})


def replace_process(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Become `command`, or exit with a shell's status for a program that cannot be started."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        why = f"cannot start {command[0]!r}: {error.strerror}; name a program that is on PATH, or its path"
        print(f"tba run: {why}", file=sys.stderr)
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        raise typer.Exit(_NOT_FOUND if missing else _NOT_RUNNABLE) from None
