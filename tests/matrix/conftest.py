"""Hooks of pytest: the page is written from the reports of tests, and the rows of one file stay on one worker.

Where `SHARE` is set (`make matrix-share`), one in `SHARES` of the rows, and of the files of other tests, is run.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from matrix.launch import ENVIRONMENT
from matrix.page import Page

SHARES = 3

# What DeepSpeed builds here as well: elsewhere a lock that an ended build has left would be waited for without end.
os.environ["TORCH_EXTENSIONS_DIR"] = ENVIRONMENT["TORCH_EXTENSIONS_DIR"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--page", type=Path, default=None, help="write what the matrix found to this file")
    parser.addoption("--filed", type=Path, default=None, help="fail where that differs from this page, figures aside")


def pytest_configure(config: pytest.Config) -> None:
    page: Path | None = config.getoption("--page")
    if page is not None and not hasattr(config, "workerinput"):  # else in a worker of xdist, whose reports come here
        config.pluginmanager.register(Page(page, config.getoption("--filed")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (share := os.environ.get("SHARE")) is None:
        return
    units = list(dict.fromkeys(_unit(item.nodeid) for item in items))
    asked = {*units[int(share) % SHARES :: SHARES]}
    config.hook.pytest_deselected(items=[item for item in items if _unit(item.nodeid) not in asked])
    items[:] = [item for item in items if _unit(item.nodeid) in asked]


def _unit(nodeid: str) -> str:
    """What is run whole or not at all: a row, one of the examples, or a file of other tests."""
    file, _, test = nodeid.partition("::")
    row = re.search(r"\[(\w+:\w+)", test)
    return row[1] if row else test if file.endswith("test_examples.py") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the rows of one file on one worker, as they share processes, and whatever imports the frameworks itself."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit(nodeid).partition(":")[0]

    return ByFile(config, log)
