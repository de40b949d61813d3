"""Results: the page of benchmarks, made of the files in benchmarks/results; nothing in it is written by hand.

Each filed result is named with its command, date, commit and machine, and links to its tables. Every bar that a
benchmark set itself is listed, those that were missed first: under "measured, and not claimed".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_HEAD = """# Benchmarks

Made from the files in `benchmarks/results` when this site was built. Each result was filed by the command shown, on the
machine named in it; [how each figure is measured](README.md) says what the numbers mean, and
[what it costs and saves](../docs/measured.md) reads them. A command that
[is no longer there](README.md#benchmarks-that-were-removed) can be run again at the commit named there.

"""
_NOT_CLAIMED = """## Measured, and not claimed

Each benchmark sets itself bars. These were missed, so no page claims them:

"""
_NOWHERE = """
Not measured at all so far: anything on a GPU. See [limits](../docs/limits.md#not-yet-run).

"""


class Bar(NamedTuple):
    """One limit that a benchmark set itself, and what came of it."""

    result: str
    what: str
    limit: str
    measured: str
    met: bool


def page(folder: Path) -> str:
    """The page's Markdown."""
    filed = {file: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    bars = [bar for file in filed for bar in bars_of(file.with_suffix(".md"))]
    lines = [
        "## Filed results",
        "",
        *_table(("result", "date", "commit", "torch", "command"), map(_row, filed.items())),
    ]
    alone = [path for path in sorted(folder.glob("*.md")) if not path.with_suffix(".json").exists()]
    lines += ["", *(f"Filed without JSON: [{path.stem}](results/{path.name})." for path in alone), ""]
    missed, met = ([bar for bar in bars if bar.met is wanted] for wanted in (False, True))
    toc = ["```{toctree}", ":hidden:", ":glob:", "", "How it is measured <README>", "results/*", "```", ""]
    return "\n".join(
        [_HEAD, *lines, _NOT_CLAIMED, *_bars(missed), _NOWHERE, "## Bars that were met", "", *_bars(met), "", *toc]
    )


def bars_of(table: Path) -> Iterator[Bar]:
    """The rows of a result's tables that have a bar, read from the Markdown that the benchmark wrote."""
    columns: list[str] = []
    if not table.exists():
        return
    for line in table.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            columns = []
        elif not columns:
            columns = cells
        elif {"bar", "met"} <= set(columns) and not set(line) <= set("|-: "):
            row = dict(zip(columns, cells, strict=False))
            if row["met"].lower() in ("yes", "no"):  # "-": measured beside, without a bar
                yield Bar(table.stem, cells[0], row["bar"], row.get("measured", ""), row["met"].lower() == "yes")


def _bars(bars: list[Bar]) -> list[str]:
    return _table(
        ("result", "what", "bar", "measured"),
        ([f"[{bar.result}](results/{bar.result}.md)", bar.what, bar.limit, bar.measured] for bar in bars),
    )


def _row(filed: tuple[Path, dict[str, Any]]) -> list[str]:
    file, result = filed
    machine = result["environment"]
    name = f"[{file.stem}](results/{file.stem}.md)"
    return [name, machine["date"], machine["commit"], machine["torch"], f"`{result['command']}`"]


def _table(head: tuple[str, ...], rows: Any) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)]
