"""`tba doctor`: one screen that says whether a machine is fit for a tier."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tba._config import OffloadConfig
from tba._errors import ConfigError

from .checks import Level, judge
from .examine import examine
from .report import as_json, show

_CANNOT_WORK, _BAD_USAGE = 1, 2


def doctor(
    tier: Annotated[str | None, typer.Option(help="keep, cpu, nvme or auto; else TBA_TIER, else auto.")] = None,
    path: Annotated[
        list[Path] | None,
        typer.Option(help="A storage path; again for several. Else TBA_STORAGE_PATHS or the default."),
    ] = None,
    in_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; bytes, and bytes per second.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=0, max=60, help="How long to measure each path and direction; 0: not.")
    ] = 1.0,
) -> None:
    """Say whether this machine is fit: disks, memory, GPUs and settings, and what to do about what is not.

    Ends with status 1 where the chosen tier cannot work, 2 where a setting is wrong.
    """
    given: dict[str, Any] = {name: value for name, value in (("tier", tier), ("storage_paths", path)) if value}
    try:
        config = OffloadConfig(**given)
    except ConfigError as error:
        print(f"tba doctor: {error}", file=sys.stderr)
        raise typer.Exit(_BAD_USAGE) from None
    facts = examine(config, seconds=seconds)
    findings = judge(facts)
    works = not any(finding.level is Level.FAILURE for finding in findings)
    if in_json:
        print(as_json(facts, findings, works=works))
    else:
        show(facts, findings, works=works)
    if not works:
        raise typer.Exit(_CANNOT_WORK)
