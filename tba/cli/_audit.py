"""`tba audit`: what each preset would do to a model's memory and gradient, before anything trains."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tba._audit.audit import PRESETS_AUDITED, audit
from tba._errors import ConfigError, OffloadWarning
from tba._text import check_picture
from tba._torch.user_frames import users_part

from ._audit_subject import subject

_FAILED, _BAD_USAGE = 1, 2


def audit_command(
    model: Annotated[
        str,
        typer.Argument(
            help="`module:callable`, imported from the working directory and called without arguments, returns a model "
            "and a batch; or a config.json of transformers, or its directory: random weights and random tokens.",
            metavar="MODEL",
        ),
    ],
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences, for a config.json; else 2.")] = None,
    sequence: Annotated[int | None, typer.Option(min=2, help="Tokens of each, for a config.json; else 128.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16, for a config.json; else its own, else float32.")
    ] = None,
    preset: Annotated[
        list[str] | None, typer.Option(help=f"A preset; again for several. Else {', '.join(PRESETS_AUDITED)}.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; bytes.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw it into this file: .png, .pdf or .svg.")] = None,
) -> None:
    """Say what each preset would do to MODEL: bytes of each class of saved tensor, and the gradient's error.

    One forward and backward is run plain and one for each preset. Nothing is trained, stored or downloaded. Ends with
    status 2 where the model cannot be audited as asked, 1 where its own code raises.
    """
    try:
        if picture is not None:
            check_picture(picture, "an audit")
        with _blaming(model), warnings.catch_warnings(record=True) as caught:
            found, arguments = subject(model, batch=batch, sequence=sequence, dtype=dtype)
            warnings.simplefilter("always", OffloadWarning)
            result = audit(found, arguments, presets=preset or PRESETS_AUDITED)
        if picture is not None:
            result.picture(picture)
    except (ConfigError, OSError) as error:
        print(f"tba audit: {error}", file=sys.stderr)
        raise typer.Exit(_BAD_USAGE) from None
    for warning in caught:
        print(f"tba audit: {warning.message}", file=sys.stderr)
    print(json.dumps(result.to_dict(), indent=2) if as_json else result)


@contextmanager
def _blaming(model: str) -> Iterator[None]:
    """Show an error of the model's own code from its first frame on, and end. Errors of our code alone pass through."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        theirs = users_part(error.__traceback__)
        if theirs is None:
            raise
        print(f"tba audit: {model} raised an error of its own:", file=sys.stderr)
        traceback.print_exception(type(error), error, theirs)
        raise typer.Exit(_FAILED) from None
