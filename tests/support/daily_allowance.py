"""Tools for tests of the daily allowance: clocks that are told the time, and a look into the file."""

from __future__ import annotations

import datetime
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tba._transfer import daily_allowance
from tba._transfer.daily_allowance import Allowance, counts_file

DAY_S = 86_400
NOON = datetime.datetime(2026, 3, 29, 12, tzinfo=datetime.UTC).timestamp()  # summer time began that night in Europe


class Clock:
    """The time of day, and seconds that only go forward; both move when told to. Stands in for the module `time`."""

    def __init__(self, wall_s: float = NOON) -> None:
        self.wall_s, self.monotonic_s = wall_s, 100.0
        self.gmtime, self.strftime = time.gmtime, time.strftime

    def time(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.monotonic_s

    def wait(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds


@contextmanager
def clock_in_force() -> Iterator[Clock]:
    """A clock that every allowance goes by."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(daily_allowance, "time", clock)
        yield clock


def allowance(directory: Path, limit: int | None) -> Allowance:
    return Allowance(limit, the_file(directory))


def the_file(directory: Path) -> Path:
    return directory / counts_file({}, "", os.uname().nodename).name


def counts(directory: Path) -> dict[str, int]:
    # To be written as well: a process killed in the midst of a transaction leaves it to be taken back by a reader.
    with closing(sqlite3.connect(f"file:{the_file(directory)}?mode=rw", uri=True)) as database:
        return dict(database.execute("SELECT day, bytes FROM written ORDER BY day"))
