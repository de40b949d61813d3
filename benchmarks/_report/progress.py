"""Progress of a benchmark on standard error, so that standard output stays clean for `--json`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def progress(title: str, total: int) -> Iterator[ProgressBar]:
    """Show a progress bar of `total` steps."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=Console(stderr=True))
    with bar:
        yield ProgressBar(bar, bar.add_task(title, total=total, note=""))


class ProgressBar:
    """A line of progress with a note at its end."""

    def __init__(self, bar: Progress, task: Any) -> None:
        self._bar, self._task = bar, task

    def advance(self, note: str = "") -> None:
        self._bar.update(self._task, advance=1, note=note)

    def note(self, note: str) -> None:
        self._bar.update(self._task, note=note)

    def finish(self) -> None:
        """Show the work as complete, even if fewer steps were needed than announced."""
        self._bar.update(self._task, total=self._bar.tasks[self._task].completed, note="")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, highlight=False, soft_wrap=True)
