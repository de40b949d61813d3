"""Results of a benchmark: shown as tables or JSON, and filed as Markdown and JSON."""

from __future__ import annotations

import datetime
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

RESULTS = Path(__file__).resolve().parents[1] / "results"
MIB = 1 << 20

# The head of a column, and what a row shows in it.
Column = tuple[str, Callable[[Any], str]]


class CannotMeasure(RuntimeError):
    """A benchmark cannot go on, or its figures would be worth nothing; the message says why."""


@dataclass(frozen=True)
class Grid:
    """A table of text: Markdown in a file, and on a terminal as rich renders Markdown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @classmethod
    def of(cls, title: str, rows: Iterable[Any], columns: Sequence[Column], note: str = "") -> Grid:
        """Make the table of some objects, from what each column shows of one."""
        cells = [[show(row) for _, show in columns] for row in rows]
        return cls(title, [head for head, _ in columns], cells, note)

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", _row(self.columns), _row(["---"] + ["---:"] * (len(self.columns) - 1))]
        lines += [_row(row) for row in self.rows]
        return "\n".join(lines + (["", self.note] if self.note else [])) + "\n"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a benchmark: tables for people, `data` (JSON-able) for programs, pictures as files.

    `package` is the one that `python -m` ran; `picture` is the one of the files that is filed with the tables.
    """

    theme: str
    tables: Sequence[Grid]
    data: Mapping[str, Any]
    files: Sequence[Path] = ()
    picture: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    package: str = "benchmarks"

    @property
    def command(self) -> str:
        """The command line, as a user would type it again."""
        return f"python -m {self.package} {shlex.join(sys.argv[1:])}"

    def document(self) -> dict[str, Any]:
        return {
            "theme": self.theme,
            "command": self.command,
            "environment": dict(self.environment),
            "files": [str(path) for path in self.files],
            **self.data,
        }


def file_result(result: Result, machine: str, folder: Path = RESULTS) -> list[Path]:
    """Write `<theme>_<machine>_<yyyymm>.md` and `.json`, and the picture if there is one; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{result.theme}_{machine}_{datetime.date.today():%Y%m}"
    described = [f"- {name}: {value}" for name, value in result.environment.items()]
    parts = [f"# {result.theme} on {machine}", f"```\n{result.command}\n```", "\n".join(described)]
    text, raw, picture = (folder / f"{stem}.{kind}" for kind in ("md", "json", "png"))
    text.write_text("\n\n".join(parts + [table.markdown() for table in result.tables]))
    names = [picture.name if path == result.picture else path.name for path in result.files]
    raw.write_text(json.dumps({**result.document(), "files": names}, indent=1) + "\n")
    if result.picture is None:
        return [text, raw]
    shutil.copy(result.picture, picture)
    return [text, raw, picture]


def show(result: Result, *, as_json: bool) -> None:
    """Print the result on standard output: JSON for programs, or the tables."""
    if as_json:
        print(json.dumps(result.document(), indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else 140)
    for table in result.tables:
        console.print(Markdown(table.markdown()))
    for path in result.files:
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)


def mib(nbytes: float) -> str:
    """Format bytes as MiB for a table."""
    return f"{nbytes / MIB:,.0f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
