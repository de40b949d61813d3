"""Blame: how a command ends on an error: in one line if it was used wrongly, by a traceback if the model raised."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tba._errors import ConfigError, StorageError
from tba._torch.user_frames import users_part

FAILED, BAD_USAGE = 1, 2


@contextmanager
def refusing(command: str) -> Iterator[None]:
    """Print an error of settings or files in one line, and exit with status 2."""
    try:
        yield
    except (ConfigError, StorageError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{str(error.filename)!r} cannot be used: {error.strerror}; name another file or directory"
        print(f"{command}: {text}", file=sys.stderr)
        raise typer.Exit(BAD_USAGE) from None


@contextmanager
def blaming(command: str, model: str) -> Iterator[None]:
    """Print an error of the model's own code from its first frame, and exit. Errors of our own code pass through."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        theirs = users_part(error.__traceback__)
        if theirs is None:
            raise
        print(f"{command}: {model} raised an error of its own:", file=sys.stderr)
        traceback.print_exception(type(error), error, theirs)
        raise typer.Exit(FAILED) from None
