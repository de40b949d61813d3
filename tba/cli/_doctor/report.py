"""Report: what `tba doctor` found, as one screen for people and as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tba._memory.limits import default_window_bytes
from tba._text import size, value_text

from .checks import Facts, Finding, Level, verdict

_STYLES = {Level.OK: "green", Level.UNUSED: "dim", Level.WARNING: "yellow", Level.FAILURE: "bold red"}


def show(facts: Facts, findings: Sequence[Finding], *, works: bool) -> None:
    """Print the verdict, the settings in force, the findings, and the verdict again, for who sees the end alone."""
    console = Console(highlight=False)
    said = Text(verdict(facts, findings), _STYLES[Level.OK if works else Level.FAILURE])
    console.print(said, soft_wrap=True)
    console.print()
    console.print(_grid((Text(label, "bold"), Text(text)) for label, text in setting_rows(facts)))
    console.print()
    console.print(_grid((Text(finding.level, _STYLES[finding.level]), _line(finding)) for finding in findings))
    console.print()
    console.print(said, soft_wrap=True)


def as_json(facts: Facts, findings: Sequence[Finding], *, works: bool) -> str:
    """Format the verdict, the findings and every fact, in bytes and bytes per second."""
    data = {
        "works": works,
        "verdict": verdict(facts, findings),
        "findings": [asdict(finding) for finding in findings],
        **asdict(facts),
    }
    return json.dumps(data, indent=2, default=str)


def setting_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    """List the settings in force: a row for each that was given, with its origin, and one for all defaults."""
    label = "settings"
    for setting in facts.settings:
        if setting["origin"] != "default":
            yield label, f"{setting['name']} = {value_text(setting['value'])}  (from {setting['origin']})"
            label = ""
    defaults = [s for s in facts.settings if s["origin"] == "default"]
    told = (f"{s['name']} = {default_text(s['name'], s['value'], facts)}" for s in defaults)
    yield label, f"by default: {', '.join(told)}"


def default_text(name: str, value: Any, facts: Facts) -> str:
    """Explain a default on this machine: None means something else in every setting."""
    if value is not None:
        return value_text(value)
    memory = facts.memory
    disk = "" if memory.nvme_budget_bytes is None else f" = {size(memory.nvme_budget_bytes)}"
    window_bytes = default_window_bytes(memory.total_bytes, min((d.total_bytes for d in facts.devices), default=None))
    ranks = f", divided by {memory.local_ranks} ranks," if memory.local_ranks > 1 else ""
    means = {
        "storage_paths": ":".join(path.path for path in facts.paths) or "below the user's cache",
        "memory_budget": "what is free, less a margin",
        "cpu_budget": f"half of the memory{ranks} = {size(memory.cpu_budget_bytes)}",
        "nvme_budget": f"80% of the free disk{ranks}{disk}",
        "staging_bytes": size(window_bytes),
        "prefetch_bytes": f"by the largest tensor, at most {size(window_bytes)}",
        "io_threads": f"{facts.io_threads} a path",
    }
    return means.get(name, "no limit" if name.startswith("max_") else "none")


def _line(finding: Finding) -> Text:
    do = f"\n-> {finding.do}" if finding.do else ""
    return Text.assemble((finding.subject, "bold"), f": {finding.text}{do}")


def _grid(lines: Iterable[tuple[Text, Text]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(label, text)
    return table
