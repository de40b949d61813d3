"""`tba audit`: what each preset would do to a model's memory and gradient, before training."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from tba._audit.audit import PRESETS_AUDITED, audit
from tba._errors import OffloadWarning
from tba._text import check_picture

from ._blame import blaming, refusing
from ._subject import (
    ABOUT_MODEL,
    BatchOption,
    ChangesOption,
    DtypeOption,
    SequenceOption,
    check_room,
    fields_of,
    is_callable,
    subject,
)


def audit_command(
    model: Annotated[
        str,
        typer.Argument(
            help=f"{ABOUT_MODEL} A config gives random weights and tokens.",
            metavar="MODEL",
        ),
    ],
    batch: BatchOption = None,
    sequence: SequenceOption = None,
    dtype: DtypeOption = None,
    changes: ChangesOption = None,
    preset: Annotated[
        list[str] | None, typer.Option(help=f"A preset; may be repeated. Default: {', '.join(PRESETS_AUDITED)}.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; bytes.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw a chart into this file: .png, .pdf or .svg.")] = None,
) -> None:
    """Show what each preset would do to MODEL: bytes of each class of saved tensor, and the gradient's error.

    Runs one forward and backward plain and one under each preset. Nothing is trained, stored or downloaded. Exits with
    status 2 if the model cannot be audited as asked, 1 if its own code raises.
    """
    with refusing("tba audit"):
        if picture is not None:
            check_picture(picture, "an audit")
        fields = fields_of(changes or ())
        if not is_callable(model):
            check_room(model, batch=batch, sequence=sequence, dtype=dtype, changes=fields)
        with blaming("tba audit", model), warnings.catch_warnings(record=True) as caught:
            found, arguments = subject(model, batch=batch, sequence=sequence, dtype=dtype, changes=fields)
            warnings.simplefilter("always", OffloadWarning)
            result = audit(found, arguments, presets=preset or PRESETS_AUDITED)
        if picture is not None:
            result.picture(picture)
    for warning in caught:
        print(f"tba audit: {warning.message}", file=sys.stderr)
    print(json.dumps(result.to_dict(), indent=2) if as_json else result)
