"""Hooks of pytest: the page is written from the reports of tests, and the rows of one file stay on one worker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from matrix.page import Page


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--page", type=Path, default=None, help="write what the matrix found to this file")
    parser.addoption("--filed", type=Path, default=None, help="fail where that differs from this page, figures aside")


def pytest_configure(config: pytest.Config) -> None:
    page: Path | None = config.getoption("--page")
    if page is not None and not hasattr(config, "workerinput"):  # else in a worker of xdist, whose reports come here
        config.pluginmanager.register(Page(page, config.getoption("--filed")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the rows of one file on one worker, as they share processes, and whatever imports the frameworks itself."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            rows = re.search(r"\[(\w+):", test)
            return rows[1] if rows else test if file.endswith("test_examples.py") else file

    return ByFile(config, log)
