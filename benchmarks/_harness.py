"""Running and filing a benchmark: progress, where the numbers come from, results as JSON and Markdown."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
MIB = 1 << 20


@dataclass(frozen=True)
class Grid:
    """A table: shown by rich on a terminal, filed as Markdown. Numbers are formatted by whoever makes it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left", caption=self.note or None, caption_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", _row(self.columns), _row(["---"] + ["---:"] * (len(self.columns) - 1))]
        lines += [_row(row) for row in self.rows]
        return "\n".join(lines + (["", self.note] if self.note else [])) + "\n"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a benchmark found: tables for people, `data` (JSON-able) for programs, pictures and traces as files."""

    theme: str
    tables: Sequence[Grid]
    data: Mapping[str, Any]
    files: Sequence[Path] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return {
            "theme": self.theme,
            "command": command(),
            "environment": dict(self.environment),
            "files": [str(path) for path in self.files],
            **self.data,
        }


def environment_block(allocators: Mapping[str, str], *, threads: int, device: str = "cpu") -> dict[str, str]:
    """Where the numbers come from; no host name and no path."""
    import torch

    block = {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": f"{os.cpu_count()} ({threads} threads used)",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "huge pages": _huge_pages(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tba": _tba_version(),
        "allocators": "; ".join(f"{arm}: {name}" for arm, name in allocators.items()),
    }
    if device == "cuda":
        block["gpu"] = torch.cuda.get_device_name()
    # The value of a variable may be a path; its name says what was changed.
    changed = [f"{k}={'...' if 'PATH' in k else v}" for k, v in sorted(os.environ.items()) if k.startswith("TBA_")]
    return block | ({"settings": ", ".join(changed)} if changed else {})


def command() -> str:
    """The command line, as a user would type it again."""
    return "python -m benchmarks " + shlex.join(sys.argv[1:])


def file_result(result: Result, machine: str, folder: Path = RESULTS) -> list[Path]:
    """Write `<theme>_<machine>_<yyyymm>.md` and `.json`; the paths written."""
    check_machine(machine)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{result.theme}_{machine}_{datetime.date.today():%Y%m}"
    described = [f"- {name}: {value}" for name, value in result.environment.items()]
    parts = [f"# {result.theme} on {machine}", f"```\n{command()}\n```", "\n".join(described)]
    text, raw = stem.with_suffix(".md"), stem.with_suffix(".json")
    text.write_text("\n\n".join(parts + [table.markdown() for table in result.tables]))
    document = {**result.document(), "files": [path.name for path in result.files]}
    raw.write_text(json.dumps(document, indent=1) + "\n")
    return [text, raw]


def check_machine(machine: str) -> str:
    """The name, if it may stand in a public file's name.

    Raises:
        ValueError: it looks like a host name or a path.
    """
    if not machine.isidentifier() or len(machine) > 16:
        raise ValueError(f"the machine's name becomes public: give a short neutral one such as vm2, not {machine!r}")
    return machine


def show(result: Result, *, as_json: bool) -> None:
    """To standard output: JSON for programs, or the tables."""
    if as_json:
        print(json.dumps(result.document(), indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else 140)
    for table in result.tables:
        console.print(table.rich())
        console.print()
    for path in result.files:
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)


@contextmanager
def progress(title: str, total: int) -> Iterator[ProgressBar]:
    """A progress bar on standard error, so that standard output stays clean for `--json`."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=Console(stderr=True))
    with bar:
        yield ProgressBar(bar, bar.add_task(title, total=total, note=""))


class ProgressBar:
    """One line of progress with a note behind it."""

    def __init__(self, bar: Progress, task: Any) -> None:
        self._bar, self._task = bar, task

    def advance(self, note: str = "") -> None:
        self._bar.update(self._task, advance=1, note=note)

    def note(self, note: str) -> None:
        self._bar.update(self._task, note=note)

    def finish(self) -> None:
        """All that was to be done is done, be it less than announced."""
        self._bar.update(self._task, total=self._bar.tasks[self._task].completed, note="")

    def say(self, text: str) -> None:
        """A line of its own above the bar, which stays."""
        self._bar.console.print(text, highlight=False, soft_wrap=True)


def median(values: Sequence[float]) -> float:
    """The middle; robust against the bursts of a shared machine."""
    return statistics.median(values)


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the ratios within each round: what drifts over the run cancels."""
    return statistics.median(ratios(over, under))


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """One over the other, round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def spread(values: Sequence[float]) -> float:
    """Half of the range in which the middle half of the values lies."""
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / 2


def doubt(values: Sequence[float]) -> float:
    """How far from the median that of many more rounds may lie, at 95 %: half of the notch that box plots have there
    (McGill, Tukey, Larsen 1978), 1.57 times the interquartile range over the root of their number."""
    return 2 * 1.57 * spread(values) / math.sqrt(len(values))


def mib(nbytes: float) -> str:
    """Bytes as MiB for a table."""
    return f"{nbytes / MIB:,.0f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _commit() -> str:
    def git(*arguments: str) -> str:
        root = Path(__file__).resolve().parent.parent
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # Results are filed into the tree that is measured; they do not make it another tree.
        changed = git("status", "--porcelain", "--", ":!benchmarks/results")
        return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "none"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "none"
    return text.partition("[")[2].partition("]")[0]


def _tba_version() -> str:
    try:
        return metadata.version("tba-offload")
    except metadata.PackageNotFoundError:
        return "from the source tree"
