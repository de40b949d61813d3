"""`tba doctor`: one screen that says whether a machine is fit for a tier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tba._config import OffloadConfig

from .._blame import FAILED, refusing
from .checks import Level, judge
from .examine import examine
from .report import as_json, show


def doctor(
    tier: Annotated[str | None, typer.Option(help="keep, cpu, nvme or auto. Default: TBA_TIER, else auto.")] = None,
    path: Annotated[
        list[Path] | None,
        typer.Option(help="A storage path; may be repeated. Default: TBA_STORAGE_PATHS, else the user's cache."),
    ] = None,
    in_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; bytes, and bytes per second.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=0, max=60, help="How long to measure each path and direction; 0 measures nothing.")
    ] = 1.0,
) -> None:
    """Check whether this machine is fit: disks, memory, GPUs and settings, and what to do about each problem.

    Exits with status 1 if the chosen tier cannot work, 2 if a setting is wrong.
    """
    given: dict[str, Any] = {name: value for name, value in (("tier", tier), ("storage_paths", path)) if value}
    with refusing("tba doctor"):
        config = OffloadConfig(**given)
    facts = examine(config, seconds=seconds)
    findings = judge(facts)
    works = not any(finding.level is Level.FAILURE for finding in findings)
    if in_json:
        print(as_json(facts, findings, works=works))
    else:
        show(facts, findings, works=works)
    if not works:
        raise typer.Exit(FAILED)
