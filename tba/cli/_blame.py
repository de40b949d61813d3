"""Blame: an error of the model's own code is shown as its own, and not as one of a command."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tba._errors import ConfigError
from tba._torch.user_frames import users_part

FAILED, BAD_USAGE = 1, 2


@contextmanager
def blaming(command: str, model: str) -> Iterator[None]:
    """Show an error of the model's own code from its first frame on, and end. Errors of our code alone pass through."""
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
