"""Launches that take too long, and a page that is not the one that is filed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from matrix.launch import launch
from matrix.page import HEAD, NOT_HERE, Page

STARTS_ANOTHER = """
import subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("started", started.pid, flush=True)
time.sleep(600)
"""
HANGS = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from matrix import runner

def stands_still(arm):
    time.sleep(600)

sys.modules["matrix.rows.hangs"] = SimpleNamespace(row=stands_still)
runner.LIMIT_S = 1
runner.run("hangs:row", Path("hangs-row"), rank=0)
"""


def test_past_its_limit_a_program_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    status, printed = launch(["-c", STARTS_ANOTHER], tmp_path, 5)
    assert status is None
    word, started = printed.split()
    assert word == "started"
    assert not psutil.pid_exists(int(started)) or psutil.Process(int(started)).status() == psutil.STATUS_ZOMBIE


def test_a_row_past_its_limit_ends_its_process_and_shows_where_it_stood(tmp_path: Path) -> None:
    status, printed = launch(["-c", HANGS], tmp_path, 120)
    assert status == 1
    assert "Timeout (0:00:01)" in printed
    assert "in stands_still" in printed
    assert (tmp_path / "hangs-row").is_dir()
    assert list((tmp_path / "hangs-row").iterdir()) == []


def _written(folder: Path, filed: Path | None, **cells: str) -> tuple[str, int]:
    """The page that a session with one row writes, and the session's exit status."""
    page = Page(folder / "page.md", filed)
    properties: list[tuple[str, Any]] = [("cell", (0, "DDP", arm, text)) for arm, text in cells.items()]
    page.pytest_runtest_logreport(SimpleNamespace(user_properties=properties))
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    page.pytest_sessionfinish(session)
    return (folder / "page.md").read_text(), session.exitstatus


def test_a_run_whose_page_differs_from_the_filed_one_in_more_than_figures_fails(tmp_path: Path) -> None:
    cells = {
        "nvme": "equal, 9.5 MiB",
        "exact": "equal, 5.0 MiB",
        "safe8": "within 5e-05, 5.0 MiB",
        "auto": "equal, 2 B",
    }
    filed = tmp_path / "filed.md"
    text, status = _written(tmp_path, None, **cells)
    assert text.startswith(HEAD)
    assert "| DDP | equal, 9.5 MiB | equal, 5.0 MiB | within 5e-05, 5.0 MiB | equal, 2 B |" in text
    assert status == pytest.ExitCode.OK
    filed.write_text(text.replace("torch 2", "torch 1"))
    assert _written(tmp_path, filed, **cells)[1] == pytest.ExitCode.OK
    others = {"safe8": "within 0.0031, 7.0 MiB", "auto": "equal, 12.3 B"}
    assert _written(tmp_path, filed, **cells | others)[1] == pytest.ExitCode.OK
    for other in ({"auto": "FAILED"}, {"auto": "cannot run; of a reason"}, {"nvme": "equal, 9.5 MiB; casts move too"}):
        assert _written(tmp_path, filed, **cells | other)[1] == pytest.ExitCode.TESTS_FAILED
    filed.unlink()
    assert _written(tmp_path, filed, **cells)[1] == pytest.ExitCode.TESTS_FAILED


def test_a_row_that_the_machine_lacks_something_for_keeps_its_line(tmp_path: Path) -> None:
    filed, arms = tmp_path / "filed.md", ("nvme", "exact", "safe8", "auto")
    filed.write_text(_written(tmp_path, None, **dict.fromkeys(arms, "equal, 9.5 MiB"))[0])
    lacking = dict.fromkeys(arms, f"{NOT_HERE}; libaio is missing")
    assert _written(tmp_path, filed, **lacking)[1] == pytest.ExitCode.OK
    filed.write_text(filed.read_text().replace("| DDP |", "| FSDP1 | equal |\n| DDP |"))
    assert _written(tmp_path, filed, **lacking)[1] == pytest.ExitCode.TESTS_FAILED
