"""The page of the matrix: written from what the tests have found, one line for each framework."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "lightning", "deepspeed", "ray", "torchao")
COLUMNS = {
    "nvme": 'tier="nvme"',
    "exact": 'compress="exact"',
    "safe8": 'compress="safe8"',
    "auto": 'tier="auto", budget',
}
HEAD = """# Frameworks, each with what it was tried

Written by `make matrix` from the results of `tests/matrix`; no cell is filled in by hand. Every row is a training of 3
steps by the framework alone, and again with each of the settings: `compress=` with `tier="nvme"`, and `tier="auto"`
with a budget of two thirds of what `tier="nvme"` moves in a step.

- **equal**: every loss and every weight after the last step is bit for bit that of the framework alone.
- **within**: `safe8` changes gradients; the losses are finite and none is further away than this (at most 0.05).
- The figure is what was offloaded, on all ranks together. No parameter is among it except where a line below says so.
  Nothing is alive at the end: no thread, no file.

"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--page", type=Path, default=None, help="write what the matrix found to this file")


@pytest.fixture(scope="session")
def cells(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], str]]:
    """What each cell shows, by the title of its row and its arm; the page is written from it at the end."""
    found: dict[tuple[str, str], str] = {}
    yield found
    page: Path | None = request.config.getoption("--page")
    if page is not None:
        page.write_text(HEAD + _table(found) + "\n" + _versions())


def _table(cells: dict[tuple[str, str], str]) -> str:
    notes: list[str] = []
    lines = ["| framework | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for title in dict.fromkeys(title for title, _ in cells):
        shown = []
        for arm in COLUMNS:
            cell, _, note = cells.get((title, arm), "not run").partition("; ")
            if note and note not in notes:
                notes.append(note)
            shown.append(f"{cell} ({notes.index(note) + 1})" if note else cell)
        lines.append(f"| {title} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""])


def _versions() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name).partition('+')[0]}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return "Versions: " + ", ".join(found) + ". CPU; several ranks talk by gloo.\n"
