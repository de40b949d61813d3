"""The page of the matrix: written from what the tests have found, one line for each framework."""

from __future__ import annotations

from collections.abc import Iterator
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
HEAD = """# Frameworks, each as it was run

Written by `make matrix` from the results of `tests/matrix`; no cell is filled in by hand. Every row is a training of 3
steps by the framework alone, and again with each of the settings: `compress=` with `tier="nvme"`, and `tier="auto"`
with a budget of two thirds of what `tier="nvme"` moves in a step.

- **equal**: every loss and every weight after the last step is bit for bit that of the framework alone.
- **within**: `safe8` changes gradients; the losses are finite and none is further away than this (at most 0.05).
- The figure is what was offloaded, on all ranks together. No parameter is among it, unless the cell says so.
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
    if page is not None and found:
        page.write_text(HEAD + _table(found, page.read_text() if page.is_file() else "") + "\n" + _versions())


def _table(cells: dict[tuple[str, str], str], before: str) -> str:
    """Make the table of all rows. Those that were not run this time keep the line that the page has."""
    rule = "|---" * (len(COLUMNS) + 1) + "|"
    lines = {line.split(" | ")[0]: line for line in before.partition(rule)[2].splitlines() if line.startswith("| ")}
    for title in dict.fromkeys(title for title, _ in cells):
        shown = [cells.get((title, arm), "not run") for arm in COLUMNS]
        lines[f"| {title}"] = f"| {title} | {' | '.join(shown)} |"
    return "\n".join(["| framework | " + " | ".join(COLUMNS.values()) + " |", rule, *lines.values(), ""])


def _versions() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name).partition('+')[0]}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return "Versions in the last run: " + ", ".join(found) + ". CPU; several ranks talk by gloo.\n"
