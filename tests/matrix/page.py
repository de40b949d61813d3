"""Page: what the matrix has found, one line for each framework, and how it differs from the page that is filed."""

from __future__ import annotations

import difflib
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

PACKAGES = (
    *("torch", "transformers", "trl", "peft", "accelerate", "lightning", "deepspeed", "ray", "torchao"),
    *("megatron-core", "torchtitan"),
)
COLUMNS = {
    "nvme": 'tier="nvme"',
    "exact": 'compress="exact"',
    "safe8": 'compress="safe8"',
    "auto": 'tier="auto", budget',
}
NOT_HERE = "not run here"  # begins the cells of a row that this machine lacks something for
HEAD = """# Frameworks, each as it was run

Written by `make matrix` from the results of `tests/matrix`; no cell is filled in by hand, and CI fails where a run
finds anything but what stands here, figures aside. Every row is a training of 3 steps by the framework alone, and again
with each of the settings: `compress=` with `tier="nvme"`, and `tier="auto"` with a budget of two thirds of what
`tier="nvme"` moves in a step.

- **equal**: every loss and every weight after the last step is bit for bit that of the framework alone.
- **within**: `safe8` changes gradients; the losses are finite and none is further away than this (at most 0.05).
- The figure is what was offloaded, on all ranks together. No parameter is among it, unless the cell says so.
  Nothing is alive at the end: no thread, no file.

"""


class Page:
    """Collects what cells show from the reports of their tests, wherever they ran, and writes the page at the end."""

    def __init__(self, page: Path, filed: Path | None) -> None:
        self._page, self._filed = page, filed
        self._cells: dict[tuple[int, str], dict[str, str]] = {}
        self._different: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cell":
                number, title, arm, text = value  # type: ignore[misc]
                self._cells.setdefault((number, title), {})[arm] = text

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._cells:
            return
        written = HEAD + self._table(self._page.read_text() if self._page.is_file() else "") + "\n" + _versions()
        self._page.write_text(written)
        if self._filed is not None:
            filed = self._filed.read_text() if self._filed.is_file() else ""
            names = str(self._filed), str(self._page)
            left_out = _left_out(written)
            pages = (_words(filed, left_out), _words(written, left_out))
            self._different = list(difflib.unified_diff(*pages, *names, lineterm="", n=0))
        if self._different and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._different:
            terminalreporter.section(f"{self._filed} is not what this run has found", red=True)
            terminalreporter.write("\n".join(self._different) + "\n")
            terminalreporter.write_line(f"once every cell is right: cp {self._page} {self._filed}")

    def _table(self, before: str) -> str:
        """Make the table of all rows. Those that were not run this time keep the line that the page has."""
        rule = "|---" * (len(COLUMNS) + 1) + "|"
        lines = {line.split(" | ")[0]: line for line in before.partition(rule)[2].splitlines() if line.startswith("| ")}
        for (_, title), cells in sorted(self._cells.items()):
            shown = [cells.get(arm, "not run") for arm in COLUMNS]
            lines[f"| {title}"] = f"| {title} | {' | '.join(shown)} |"
        return "\n".join(["| framework | " + " | ".join(COLUMNS.values()) + " |", rule, *lines.values(), ""])


def _left_out(page: str) -> tuple[str, ...]:
    """How the lines begin of rows that the machine lacks something for."""
    return tuple(line[: line.index(" | ") + 3] for line in page.splitlines() if f"| {NOT_HERE}" in line)


def _words(page: str, left_out: tuple[str, ...] = ()) -> list[str]:
    """The lines of a page without figures, those that are left out, and the versions, which stand last."""
    lines = page.rpartition("\nVersions")[0].splitlines()
    return [re.sub(r"\b\d[\d.]*(e-?\d+)?\b", "N", line) for line in lines if not line.startswith(left_out)]


def _versions() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name).partition('+')[0]}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return "Versions in the last run: " + ", ".join(found) + ". CPU; several ranks talk by gloo.\n"
